"""The search in one cell: old findings, pinned cases, then drawn ones, shrunk when one is wrong."""

import hashlib
from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure

import cases
from cases import probes
from cases.case import Case
from harness.diagnosis import Diagnosis
from harness.profiles import Profile
from harness.record import BAD, Record, Status
from harness.run import Cell, judge, plan

_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)

AHEAD = 2000
"""Cases drawn ahead for a worker; what is asked beyond them goes one by one."""
FOLLOWED = 8
"""Wrong cases, of those met while shrinking, by which faults are told apart."""
FRESH = 200
"""Drawn cases by which they are, where those do not suffice."""


class Found(Exception):
    """A case was judged wrong; carries the record."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.why)
        self.record = record


def search(
    cell: Cell,
    profile: Profile,
    run_seed: int,
    keep: Callable[[Record], None],
    *,
    examples: int | None = None,
    pinned: bool = True,
    corpus: Iterable[Case] = (),
) -> Record | None:
    """Judge given cases and `examples` drawn ones; stop at the first finding and shrink it.

    Given are those of the corpus and then, if `pinned`, exact probes (`cases.probes`) and the op's
    pinned ones. A case of the corpus is small already; after another one that is wrong, drawing
    goes on, to find a smaller one.

    A case over which a worker is lost is recorded and not shrunk; the others go on.

    keep: takes every record up to the finding and then the smallest failing one, not the tries
        in between. run_seed: with the cell's name it decides what is drawn.

    Returns:
        The record of the smallest failing case, else of one over which a worker was lost, or None.
    """
    count = profile.examples if examples is None else examples
    if cell.subject.slow:
        count = min(count, profile.slow_examples)
    if count == 0:
        return None
    module = cases.load(cell.op)
    found_before = list(corpus)
    written = [case for _, case in module.PINNED] if pinned else []
    if pinned and not cell.subject.slow:
        written = [*probes.first(cell.op, cell.subject.claims, cell.subject.dtypes), *written]
    strategy = module.strategy(cell.subject.claims, cell.subject.dtypes, large=profile.large)

    def drawing(body: Callable[[Case], None], examples: int) -> Callable[[], None]:
        """`body` on drawn cases: the same ones whatever it does, until it raises."""
        return seed(_seed(run_seed, cell.name))(
            settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=False,
                report_multiple_bugs=False,
                print_blob=False,
                suppress_health_check=_CHECKS,
                phases=(Phase.generate, Phase.shrink),
            )(given(case=strategy)(body))
        )

    ahead: list[Case] = []
    if cell.place is not None:  # a worker answers several cases a message

        def note(case: Case) -> None:
            ahead.append(case)

        drawing(note, min(count, AHEAD))()
        plan([*found_before, *written, *ahead], cell)
    lost: list[Record] = []
    failing: list[Record] = []

    def told(found: Record, kept: Record | None = None) -> Record:
        """The finding, named by what other cases say too, and kept."""
        named = _named(found, failing, cell, lambda ask: drawing(ask, min(count, FRESH))())
        if named != kept:
            keep(named)
        return named

    if found := _given(found_before, cell, keep, lost):
        return told(found)
    large = _given(written, cell, keep, lost)
    if large is not None:
        keep(large)
        if large.lost:  # nobody is there to be asked
            return large

    def put(case: Case) -> Record:
        record = judge(case, cell)
        if not failing:
            keep(record)
        if record.lost:
            lost.append(record)
        return record

    answered: dict[Case, Record] = {}
    for case in ahead:
        if lost and lost[-1].lost == "worker":
            break
        answered[case] = put(case)
        if _wrong(answered[case]):
            break

    def check(case: Case) -> None:
        if lost and lost[-1].lost == "worker":
            return
        record = answered.pop(case, None) or put(case)
        # While shrinking, a case that is wrong in another way is not this finding made smaller.
        if _wrong(record) and (not failing or record.status is failing[0].status):
            failing.append(record)
            raise Found(record)

    try:
        if not ahead or count > AHEAD or any(map(_wrong, answered.values())):
            drawing(check, count)()
    except Found as found:
        smallest = found.record
    except FlakyFailure:
        smallest = cell.unrepeatable(failing[0], _case(failing[0]))
    else:
        return told(large, large) if large else lost[0] if lost else None
    return told(smallest, failing[0])


def _named(
    found: Record,
    failing: list[Record],
    cell: Cell,
    draw: Callable[[Callable[[Case], None]], None],
) -> Record:
    """The finding with the fault that other cases confirm, and what a probe of its shape reads.

    draw: asks what it is given about freshly drawn cases.
    """
    if found.status is not Status.DISAGREE:
        return found
    diagnosis = Diagnosis(cell, _case(found))
    for record in failing[:FOLLOWED]:
        diagnosis.ask(_case(record))
    if not diagnosis.settled:
        draw(lambda case: diagnosis.ask(case, drawn=True))
    return diagnosis.told(found, _case(found))


def _wrong(record: Record) -> bool:
    """Whether it is a finding to make smaller: to shrink a loss would cost a worker every try."""
    return record.status in BAD and not record.lost


def _case(record: Record) -> Case:
    return cases.load(record.op).CASE.from_json(record.case)


def _given(
    given: Iterable[Case], cell: Cell, keep: Callable[[Record], None], lost: list[Record]
) -> Record | None:
    """Judge cases that are not drawn, keep what is no finding, return what is one, if any.

    lost: takes the records over which a worker was lost; the other cases go on.
    """
    for case in given:
        record = judge(case, cell)
        if record.lost == "case":
            lost.append(record)
        elif record.status in BAD:
            return record
        keep(record)
    return None


def _seed(run_seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{name}".encode()).digest()[:8], "little")
