"""One case put to one cell: refuse, send, run, fetch, judge, explain, record."""

import functools
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from cases import defects, probes
from cases.case import Case, Inputs
from cases.defects import Defect
from harness import contract, faults, place, programs
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import DET, PROB
from harness.call import Elsewhere, Wrong, call
from harness.compare import Verdict, compare
from harness.environments import client
from harness.environments.client import Lost, NoWorker
from harness.known import Known
from harness.lane import Presence, Tier
from harness.record import Record, Status
from harness.subject import Program, Subject

AGAIN = 8
"""One case in so many is asked twice, the second time with the path proof: the same question must
get the same bits, from the kernel that was meant."""
FRESH = 3
"""Fresh seeds with which a case that only `prob` rejects is asked again (NUMERICS 4, T1)."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A subject on a lane, how the lane is present, and in which worker it runs, if in one.

    known: accepted divergences. suspected: names of the faults to look for in a wrong answer; all
        that the op's dictionary has if None.
    """

    op: str
    subject: Subject
    lane: str
    presence: Presence
    place: client.Place | None = None
    known: tuple[Known, ...] = field(default=(), repr=False)
    suspected: frozenset[str] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.subject.name}@{self.lane}"

    @property
    def program(self) -> Program:
        """The arithmetic declared for the device, or the op's envelope."""
        return self.subject.programs.get(self.presence.device or "", self.envelope)

    @property
    def envelope(self) -> Program:
        """What the dtypes of the op allow, whoever computes it."""
        return programs.envelope(self.op)

    @property
    def dictionary(self) -> tuple[Defect, ...]:
        """The faults that are looked for in a wrong answer."""
        faults_ = defects.load(self.op)
        if self.suspected is None:
            return faults_
        return tuple(fault for fault in faults_ if fault.name in self.suspected)

    @property
    def replicated(self) -> bool:
        """Whether the arithmetic on this device is declared rather than bounded by the envelope."""
        return (self.presence.device or "") in self.subject.programs

    @property
    def held_to(self) -> str:
        """In a word: exact (the op has no rounding), declared, or envelope."""
        if programs.load(self.op).EXACT:
            return "exact"
        return "declared" if self.replicated else "envelope"

    def divergences(self, case: Case) -> tuple[Known, ...]:
        """The accepted divergences that cover the case for this subject on this device."""
        return tuple(known for known in self._concerning if known.matches(case))

    @functools.cached_property
    def _concerning(self) -> tuple[Known, ...]:
        name, device = self.subject.name, self.presence.device
        return tuple(known for known in self.known if known.concerns(self.op, name, device))

    def record(self, status: Status, case: Case | None = None, **more: object) -> Record:
        return Record(
            op=self.op,
            subject=self.subject.name,
            lane=self.lane,
            tier=self.presence.tier.value,
            status=status,
            program=self.held_to,
            case=case.to_json() if case else "",
            case_id=case.id if case else "",
            **more,  # pyright: ignore[reportArgumentType]
        )

    def unrepeatable(self, record: Record, case: Case) -> Record:
        """The record of a case that was judged as `record` says, and later was not."""
        why = f"not repeatable: the same case was judged wrong, and later right ({record.why})"
        return self.record(Status.ERROR, case, excess=float("inf"), why=why)

    def absent(self) -> Record:
        return self.record(Status.ABSENT, why=self.presence.reason)


class _Clock:
    """Wall time split into the subject's, the program's, and everything else, in ms."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.subject = self.program = 0.0

    @contextmanager
    def of_subject(self) -> Iterator[None]:
        """What passes inside is the subject's, also if it raises."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.subject += (time.perf_counter() - before) * 1e3

    def split(self) -> dict[str, float]:
        total = (time.perf_counter() - self.start) * 1e3
        return {
            "subject_ms": round(self.subject, 3),
            "program_ms": round(self.program, 3),
            "other_ms": round(total - self.subject - self.program, 3),
        }


class Raised(Exception):
    """The subject raised in its worker; carries the traceback from there."""


def judge(case: Case, cell: Cell) -> Record:
    """Put `case` to `cell`. Never raises for what the subject does: that is a status."""
    if cell.presence.tier is Tier.ABSENT:
        return cell.absent()
    if reason := cell.subject.refuses(case):
        return cell.record(Status.REFUSED, case, why=reason)
    accepted = cell.divergences(case)
    if known := _whole(accepted):
        return cell.record(Status.KNOWN, case, why=f"{known.id}: {known.why}")
    return ask(case, cell, spare_dead=bool(accepted))


def _whole(entries: Iterable[Known]) -> Known | None:
    """The first entry that spares the whole case."""
    return next((known for known in entries if known.spares == "case"), None)


def ask(case: Case, cell: Cell, *, spare_dead: bool = False) -> Record:
    """`judge` without refusals and known divergences: the bare question, as known.toml pins it."""
    try:
        return _asked(case, cell, spare_dead=spare_dead)
    except (Lost, NoWorker) as error:
        lost = "case" if isinstance(error, Lost) else "worker"
        return cell.record(Status.ERROR, case, excess=float("inf"), why=str(error), lost=lost)


@functools.lru_cache(maxsize=4096)
def _vacuous(case: Case) -> str | None:
    """Why the case can't tell right from wrong; pinned ones are put to every subject of an op."""
    return case.vacuous(case.inputs())


def _asked(case: Case, cell: Cell, *, spare_dead: bool) -> Record:
    clock = _Clock()
    inputs = case.inputs()
    if reason := _vacuous(case):
        return cell.record(Status.VACUOUS, case, why=reason)
    try:
        observed = answer(case, inputs, cell, clock)
    except Wrong as error:
        return cell.record(
            Status.DISAGREE, case, excess=float("inf"), why=str(error), **clock.split()
        )
    except Elsewhere as error:
        return cell.record(Status.ERROR, case, excess=float("inf"), why=str(error))
    except (Lost, NoWorker):
        raise
    except Exception as error:
        why = str(error) if isinstance(error, Raised) else traceback.format_exc(limit=-3).strip()
        return cell.record(Status.ERROR, case, excess=float("inf"), why=why, **clock.split())
    keep = dict(case.judged(inputs))
    if spare_dead:
        keep = _without_dead(case, inputs, keep)
    return _verdict(case, cell, case.anchored(inputs, observed), observed, keep, clock)


def answer(
    case: Case, inputs: Inputs, cell: Cell, clock: _Clock | None = None
) -> dict[str, torch.Tensor]:
    """What the subject says, in this process or in its worker: outputs by name, on the CPU.

    Raises:
        Lost, NoWorker: the worker has no answer.
        Exception: what `harness.call` raises.
    """
    clock = clock or _Clock()
    device = cell.presence.device or ""
    if cell.place is None:
        return call(cell.subject, case, inputs, device, clock.of_subject, again=_again(case))
    reply = _worker(cell.place).ask(_request(case, cell, cell.place))
    clock.subject += reply.ms
    match reply.outcome:
        case "wrong":
            raise Wrong(reply.why)
        case "elsewhere":
            raise Elsewhere(reply.why)
        case "raised":
            raise Raised(reply.why)
    if problem := contract.broken(case, reply.outputs):
        raise Wrong(problem)
    return reply.outputs


def plan(asked: Iterable[Case], cell: Cell) -> None:
    """Tell the cell's worker what it will be asked, in this order, so that it answers in batches.

    Not sent ahead: what the subject refuses, what is known to diverge, and what can't tell.
    """
    if cell.place is not None:
        _worker(cell.place).plan(
            _request(case, cell, cell.place)
            for case in asked
            if not (cell.subject.refuses(case) or _whole(cell.divergences(case)) or _vacuous(case))
        )


def _again(case: Case) -> bool:
    """Whether this case is one of those that are looked at in every way."""
    return case.seed % AGAIN == 0


def _worker(place: client.Place) -> client.Worker:
    return client.worker(place.environment, place.command)


def _request(case: Case, cell: Cell, place: client.Place) -> client.Request:
    return client.Request(
        op=cell.op,
        module=place.module,
        subject=cell.subject.name,
        case=case,
        device=cell.presence.device or "",
        again=_again(case),
    )


def _without_dead(case: Case, inputs: Inputs, keep: dict[str, torch.Tensor]) -> dict:
    for name, dead in case.dead(inputs).items():
        keep[name] = ~dead & keep[name] if name in keep else ~dead
    return keep


def _verdict(
    case: Case,
    cell: Cell,
    inputs: Inputs,
    observed: dict[str, torch.Tensor],
    keep: Mapping[str, torch.Tensor],
    clock: _Clock,
) -> Record:
    mode = DET if case.structured else PROB

    def timed(program: Program, mode: object) -> dict:
        before = time.perf_counter()
        out = program(case, inputs, mode)  # pyright: ignore[reportArgumentType]
        clock.program += (time.perf_counter() - before) * 1e3
        return out

    def record(status: Status, verdict: Verdict, why: str = "", fault: str = "") -> Record:
        words = () if status is Status.AGREE else (case.wording(observed), why or verdict.why)
        return cell.record(
            status,
            case,
            excess=verdict.excess,
            exact=verdict.exact,
            elements=verdict.elements,
            output=verdict.output,
            where=verdict.where,
            why="; ".join(filter(None, words)),
            fault=fault,
            **clock.split(),
        )

    own = timed(cell.program, mode)
    verdict = compare(observed, own, keep)
    if verdict.allowed and not (cell.replicated and _again(case)):
        return record(Status.AGREE, verdict)
    bound = timed(cell.envelope, DET)
    outside = compare(observed, bound, keep)
    if not outside.elements:
        return record(Status.VACUOUS, outside, f"the dtypes of {case.dtype} bound no element of it")
    if verdict.allowed and outside.allowed:
        return record(Status.AGREE, verdict)
    said = _told(case, inputs, verdict, observed, own, keep)
    fault = faults.name(case, inputs, observed, bound, cell.dictionary)
    if fault:
        return record(Status.DISAGREE, verdict, f"{fault}; {said}", fault.defect.name)
    if not outside.allowed:
        said = _told(case, inputs, outside, observed, bound, keep)
        if verdict.allowed:
            said = f"the declared arithmetic allows what no arithmetic of {case.dtype} does; {said}"
        return record(Status.DISAGREE, outside, said)
    if mode is PROB and compare(observed, timed(cell.program, DET), keep).allowed:
        again = _repeats(case, cell)
        if not again:
            return record(Status.SUSPECT, verdict, f"not repeated with {FRESH} fresh seeds; {said}")
    return record(
        Status.DRIFT,
        verdict,
        f"rounds elsewhere than declared: the envelope of {case.dtype} holds "
        f"({outside.excess:.3g}), the declared arithmetic does not; {verdict.exact} of "
        f"{verdict.elements} elements exact; {said}",
    )


def _told(
    case: Case,
    inputs: Inputs,
    verdict: Verdict,
    observed: Mapping[str, torch.Tensor],
    allowed: Mapping[str, MidRad],
    keep: Mapping[str, torch.Tensor],
) -> str:
    """What a probe reads, and where the answer is wrong."""
    wrong = {name: observed[name] for name in place.outside(observed, allowed, keep)}
    reading = probes.read(case, inputs, wrong)
    said = place.sentence(case, verdict, observed, allowed, keep)
    return said if reading is None else f"{reading}; {said}"


def _repeats(case: Case, cell: Cell) -> bool:
    """Whether `prob` rejects the same shape again with fresh values."""
    for step in range(1, FRESH + 1):
        fresh = replace(case, seed=(case.seed + step * 0x9E3779B1) % 2**32)
        inputs = fresh.inputs()
        if fresh.vacuous(inputs):
            continue
        observed, keep = answer(fresh, inputs, cell), fresh.judged(inputs)
        inputs = fresh.anchored(inputs, observed)
        verdict = compare(observed, cell.program(fresh, inputs, PROB), keep)
        if not verdict.allowed:
            return True
    return False
