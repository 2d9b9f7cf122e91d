"""The search in one cell: pinned cases first, then drawn ones, shrunk when one is wrong."""

import hashlib
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings, target
from hypothesis.errors import FlakyFailure

import cases
from cases.case import Case
from harness.profiles import Profile
from harness.record import BAD, Record, Status
from harness.run import Cell, judge

_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


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
) -> Record | None:
    """Judge the pinned cases and `examples` drawn ones; stop at the first finding and shrink it.

    keep: takes every record up to the finding and then the smallest failing one, not the tries
        in between. run_seed: with the cell's name it decides what is drawn.

    Returns:
        The record of the smallest failing case, or None.
    """
    count = profile.examples if examples is None else examples
    if cell.subject.slow:
        count = min(count, profile.slow_examples)
    if count == 0:
        return None
    if pinned and (found := _pinned(cell, keep)):
        return found
    module = cases.load(cell.op)
    strategy = module.strategy(cell.subject.claims, cell.subject.dtypes, large=profile.large)
    failing: list[Record] = []

    @seed(_seed(run_seed, cell.name))
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=_CHECKS,
        phases=(Phase.generate, Phase.target, Phase.shrink),
    )
    @given(case=strategy)
    def check(case: Case) -> None:
        record = judge(case, cell)
        if not failing:
            if record.status in BAD:
                failing.append(record)
            keep(record)
        elif record.status in BAD:
            failing.append(record)
        if record.status in BAD:
            raise Found(record)
        if profile.target:
            target(min(record.excess, 1e6), label="excess")

    try:
        check()
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
        return None
    if smallest.case_id != failing[0].case_id:
        keep(smallest)
    return smallest


def _case(record: Record) -> Case:
    return cases.load(record.op).CASE.from_json(record.case)


def _pinned(cell: Cell, keep: Callable[[Record], None]) -> Record | None:
    """Judge the op's pinned cases; those that the subject does not claim are recorded refused."""
    for _, case in cases.load(cell.op).PINNED:
        record = judge(case, cell)
        keep(record)
        if record.status in BAD:
            return record
    return None


def _seed(run_seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{name}".encode()).digest()[:8], "little")
