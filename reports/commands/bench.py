"""`parity bench`: where the time of a pre-merge run goes, on one core."""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness import garbage, profiles
from harness.cells import cells
from harness.lane import Tier
from harness.record import JUDGED, Record
from harness.run import Cell
from harness.search import search
from reports import usage
from reports.options import OnlyOps, Seed

FIRST = 5
"""Cases drawn for every cell before the clock starts."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Wall time of one op's cells, in seconds, and of its judged cases, in milliseconds.

    drawing: what passed outside of judging: Hypothesis and the strategy.
    """

    op: str
    cells: int
    records: tuple[Record, ...]
    wall: float

    @property
    def subject(self) -> float:
        return sum(r.subject_ms for r in self.records) / 1e3

    @property
    def program(self) -> float:
        return sum(r.program_ms for r in self.records) / 1e3

    @property
    def other(self) -> float:
        return self.wall - self.subject - self.program

    @property
    def drawing(self) -> float:
        return self.other - sum(r.other_ms for r in self.records) / 1e3

    def middle(self, of: Callable[[Record], float]) -> float:
        """The median over judged cases, 0 where there is none."""
        return median([of(r) for r in self.records if r.status in JUDGED] or [0.0])


def bench(
    op: OnlyOps = None,
    seed: Seed = 0,
) -> None:
    """Time the pre-merge cases of every present cell in this process, one after another.

    Per op: wall time in the subject, in the program, and in everything else; then medians per
    judged case, and the peak resident memory of the process.
    """
    names = usage.ops(op)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    found = cells(ops=names)
    costs = []
    for name in names:
        present = [c for c in found if c.op == name and c.presence.tier is not Tier.ABSENT]
        if present:
            with console.status(f"{name}: {len(present)} cells"):
                costs.append(_cost(name, present, seed))
    if len(costs) > 1:
        costs.append(_together(costs))
    console.print(_table(costs))
    console.print("drawing: Hypothesis and the strategy; beyond: all but the subject")
    console.print(f"peak resident memory {_peak():.2f} GB")


def _cost(op: str, present: list[Cell], seed: int) -> Cost:
    profile = profiles.load("premerge")
    for cell in present:  # imports, workers' starts and first calls are no part of a case
        search(cell, profile, seed, lambda record: None, examples=FIRST, pinned=False)
    garbage.settle()
    records: list[Record] = []
    start = time.perf_counter()
    for cell in present:
        search(cell, profile, seed, records.append)
    wall = time.perf_counter() - start
    return Cost(op=op, cells=len(present), records=tuple(records), wall=wall)


def _together(costs: Sequence[Cost]) -> Cost:
    return Cost(
        op="all",
        cells=sum(cost.cells for cost in costs),
        records=tuple(record for cost in costs for record in cost.records),
        wall=sum(cost.wall for cost in costs),
    )


def _table(costs: Sequence[Cost]) -> Table:
    """An op a column."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for cost in costs:
        table.add_column(cost.op, justify="right", no_wrap=True)

    def row(name: str, of: Callable[[Cost], str], *, last: bool = False) -> None:
        table.add_row(name, *(of(cost) for cost in costs), end_section=last)

    row("cells", lambda c: str(c.cells))
    row("cases judged", lambda c: str(sum(r.status in JUDGED for r in c.records)))
    row("wall time, s", lambda c: f"{c.wall:.1f}", last=True)
    row("of it in the subject", lambda c: f"{c.subject / c.wall:.1%}")
    row("in the program", lambda c: f"{c.program / c.wall:.1%}")
    row("in everything else", lambda c: f"{c.other / c.wall:.1%}")
    row("of that drawing", lambda c: f"{c.drawing / c.wall:.1%}", last=True)
    row("median case, ms: subject", lambda c: f"{c.middle(lambda r: r.subject_ms):.2f}")
    row("program", lambda c: f"{c.middle(lambda r: r.program_ms):.2f}")
    row("everything else", lambda c: f"{c.middle(lambda r: r.other_ms):.2f}")
    row("beyond", lambda c: f"{c.middle(lambda r: r.program_ms + r.other_ms):.2f}")
    return table


def _peak() -> float:
    """Peak resident set of this process in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
