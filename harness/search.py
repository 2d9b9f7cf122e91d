"""The search in one cell: old findings, pinned cases, then drawn ones, shrunk when one is wrong."""

import hashlib
from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, Phase, given, seed, settings, target
from hypothesis.errors import FlakyFailure

import cases
from cases.case import Case
from harness.profiles import Profile
from harness.record import BAD, Record, Status
from harness.run import Cell, judge, plan

_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


AHEAD = 2000
"""Cases drawn ahead for a worker; what is asked beyond them goes one by one."""


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

    Given are those of the corpus, and then, if `pinned`, the op's pinned ones. A case of the corpus
    is small already; after a pinned one that is wrong, drawing goes on, to find a smaller one.

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
    published = [case for _, case in module.PINNED] if pinned else []
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
                phases=(Phase.generate, Phase.target, Phase.shrink),
            )(given(case=strategy)(body))
        )

    if cell.place is not None:
        # A worker answers several cases a message. What will be asked is known by drawing it twice.
        ahead = [*found_before, *published]

        def note(case: Case) -> None:
            ahead.append(case)

        drawing(note, min(count, AHEAD))()
        plan(ahead, cell)
    lost: list[Record] = []
    if found := _given(found_before, cell, keep, lost):
        return found
    large = _given(published, cell, keep, lost)
    if large is not None and large.lost:  # nobody is there to be asked
        return large
    failing: list[Record] = []

    def check(case: Case) -> None:
        if lost and lost[-1].lost == "worker":
            return
        record = judge(case, cell)
        if not failing:
            keep(record)
        if record.lost:  # shrinking would start a worker for every try
            lost.append(record)
        # While shrinking, a case that is wrong in another way is not this finding made smaller.
        elif record.status in BAD and (not failing or record.status is failing[0].status):
            failing.append(record)
            raise Found(record)
        elif profile.target:
            target(min(record.excess, 1e6), label="excess")

    try:
        drawing(check, count)()
    except Found as found:
        smallest = found.record
    except FlakyFailure:
        first = failing[0]
        smallest = cell.record(
            Status.ERROR,
            _case(first),
            excess=float("inf"),
            why=f"not repeatable: the same case was judged wrong, and later right ({first.why})",
        )
    else:
        return large or (lost[0] if lost else None)
    if smallest.case_id != failing[0].case_id:
        keep(smallest)
    return smallest


def _case(record: Record) -> Case:
    return cases.load(record.op).CASE.from_json(record.case)


def _given(
    given: Iterable[Case], cell: Cell, keep: Callable[[Record], None], lost: list[Record]
) -> Record | None:
    """Judge cases that are not drawn; the finding, if any. What is not claimed is refused.

    lost: takes the records over which a worker was lost; the other cases go on.
    """
    for case in given:
        record = judge(case, cell)
        keep(record)
        if record.lost == "case":
            lost.append(record)
        elif record.status in BAD:
            return record
    return None


def _seed(run_seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{name}".encode()).digest()[:8], "little")
