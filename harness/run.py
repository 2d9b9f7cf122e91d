"""One case put to one cell: refuse, send, run, fetch, judge, explain, record."""

import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from cases import defects
from cases.case import Case, Inputs
from harness import contract, faults, programs, runtimes
from harness.arithmetic.mode import DET, PROB
from harness.compare import Verdict, compare
from harness.known import Known, covering
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
    """A subject on a lane, and how the lane is present here."""

    op: str
    subject: Subject
    lane: str
    presence: Presence
    known: tuple[Known, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        return f"{self.subject.name}@{self.lane}"

    @property
    def program(self) -> Program:
        """The arithmetic declared for the device, or the op's envelope."""
        return self.subject.programs.get(self.presence.device or "", programs.envelope(self.op))

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


class _Wrong(Exception):
    """The subject answered, and its answer breaks the contract."""


class _Elsewhere(Exception):
    """Another kernel ran than the one that was meant."""


def judge(case: Case, cell: Cell) -> Record:
    """Put `case` to `cell`. Never raises for what the subject does: that is a status."""
    if cell.presence.tier is Tier.ABSENT:
        return cell.absent()
    if reason := cell.subject.refuses(case):
        return cell.record(Status.REFUSED, case, why=reason)
    covering_ = covering(cell.known, cell.subject.name, cell.presence.device, case)
    if whole := [known for known in covering_ if known.spares == "case"]:
        return cell.record(Status.KNOWN, case, why=f"{whole[0].id}: {whole[0].why}")
    return ask(case, cell, spare_dead=bool(covering_))


def ask(case: Case, cell: Cell, *, spare_dead: bool = False) -> Record:
    """`judge` without refusals and known divergences: the bare question, as known.toml pins it."""
    clock = _Clock()
    inputs = case.inputs()
    if reason := case.vacuous(inputs):
        return cell.record(Status.VACUOUS, case, why=reason)
    try:
        observed = answer(case, inputs, cell, clock)
    except _Wrong as error:
        return cell.record(
            Status.DISAGREE, case, excess=float("inf"), why=str(error), **clock.split()
        )
    except _Elsewhere as error:
        return cell.record(Status.ERROR, case, excess=float("inf"), why=str(error))
    except Exception:
        why = traceback.format_exc(limit=-3).strip()
        return cell.record(Status.ERROR, case, excess=float("inf"), why=why, **clock.split())
    keep = dict(case.judged(inputs))
    if spare_dead:
        keep = _without_dead(case, inputs, keep)
    return _verdict(case, cell, case.anchored(inputs, observed), observed, keep, clock)


def answer(
    case: Case, inputs: Inputs, cell: Cell, clock: _Clock | None = None
) -> dict[str, torch.Tensor]:
    """What the subject says: outputs by name, on the CPU.

    Raises:
        Exception: whatever the subject raises.
    """
    clock = clock or _Clock()
    runtime = runtimes.load(cell.subject.runtime)
    device = cell.presence.device or ""
    answers, sent = [], {}
    for again in range(2 if case.seed % AGAIN == 0 else 1):
        with runtime.on(device):
            sent = {name: runtime.send(x, device) for name, x in inputs.items()}
            with clock.of_subject():
                call = _traced if again else _call
                answers.append(call(case, sent, cell, runtime))
    problem = contract.broken(case, answers[0]) or contract.changed(
        inputs, {name: runtime.fetch(x) for name, x in sent.items()}
    )
    if problem is None and len(answers) == 2:
        problem = contract.same(*answers)
    if problem:
        raise _Wrong(problem)
    return answers[0]


def _call(case: Case, sent: dict, cell: Cell, runtime: runtimes.Runtime) -> dict[str, torch.Tensor]:
    raw = cell.subject.run(case, dict(sent))
    if not isinstance(raw, Mapping):
        raise _Wrong(
            f"the subject returned {type(raw).__name__}, expected a dict of "
            f"{', '.join(case.output_dtypes())}"
        )
    return {name: _fetched(runtime, name, x) for name, x in raw.items()}


def _traced(
    case: Case, sent: dict, cell: Cell, runtime: runtimes.Runtime
) -> dict[str, torch.Tensor]:
    """The call with its path proof: the kernels that were meant are among those that ran."""
    meant = [name.format(device=cell.presence.device) for name in cell.subject.kernels]
    if not meant:
        return _call(case, sent, cell, runtime)
    with runtime.trace() as ran:
        got = _call(case, sent, cell, runtime)
    if missing := [name for name in meant if name not in ran]:
        raise _Elsewhere(
            f"{', '.join(missing)} did not run; ran: {', '.join(sorted(ran)) or 'nothing'}"
        )
    return got


def _fetched(runtime: runtimes.Runtime, name: str, x: object) -> torch.Tensor:
    try:
        return runtime.fetch(x)
    except TypeError as error:
        raise _Wrong(f"output {name}: {error}") from error


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
        said = None if status is Status.AGREE else case.wording(observed)
        return cell.record(
            status,
            case,
            excess=verdict.excess,
            exact=verdict.exact,
            elements=verdict.elements,
            output=verdict.output,
            where=verdict.where,
            why="; ".join(filter(None, (said, why or verdict.why))),
            fault=fault,
            **clock.split(),
        )

    verdict = compare(observed, timed(cell.program, mode), keep)
    if verdict.allowed:
        return record(Status.AGREE, verdict)
    bound = timed(programs.envelope(cell.op), DET)
    outside = compare(observed, bound, keep)
    fault = faults.name(case, inputs, observed, bound, defects.load(cell.op))
    if fault:
        return record(Status.DISAGREE, verdict, f"{fault}; {verdict.why}", fault.defect.name)
    if not outside.allowed:
        return record(Status.DISAGREE, outside)
    if mode is PROB and compare(observed, timed(cell.program, DET), keep).allowed:
        again = _repeats(case, cell)
        if not again:
            return record(
                Status.SUSPECT, verdict, f"not repeated with {FRESH} fresh seeds; {verdict.why}"
            )
    return record(
        Status.DRIFT,
        verdict,
        f"rounds elsewhere than declared: the envelope of {case.dtype} holds "
        f"({outside.excess:.3g}), the declared arithmetic does not; {verdict.exact} of "
        f"{verdict.elements} elements exact; {verdict.why}",
    )


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
