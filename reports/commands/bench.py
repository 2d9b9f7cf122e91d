"""`parity bench`: where the time of a pre-merge run goes, on one core."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import cases
from harness import profiles
from harness.cells import cells
from harness.lane import Tier
from harness.record import JUDGED, Record
from harness.run import Cell, judge
from harness.search import search
from reports import usage
from reports.options import OnlyOps, Seed


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
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("op")
    for head in ("cells", "cases", "wall s"):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("subject", "program", "else", "drawing"):
        table.add_column(f"% in\n{head}", justify="right", no_wrap=True)
    for head in ("subject", "program", "else", "beyond"):
        table.add_column(f"ms in\n{head}", justify="right", no_wrap=True)
    found = cells(ops=names)
    for name in names:
        present = [c for c in found if c.op == name and c.presence.tier is not Tier.ABSENT]
        if not present:
            continue
        with console.status(f"{name}: {len(present)} cells"):
            table.add_row(*_row(_cost(name, present, seed)))
    console.print(table)
    console.print("% of the wall time; else includes drawing: Hypothesis and the strategy")
    console.print("ms in the median case; beyond is all but the subject")
    console.print(f"peak resident memory {_peak():.2f} GB")


def _cost(op: str, present: list[Cell], seed: int) -> Cost:
    profile = profiles.load("premerge")
    for cell in present:  # imports and first calls are no part of a case
        judge(cases.load(op).PINNED[0][1], cell)
    records: list[Record] = []
    start = time.perf_counter()
    for cell in present:
        search(cell, profile, seed, records.append)
    wall = time.perf_counter() - start
    return Cost(op=op, cells=len(present), records=tuple(records), wall=wall)


def _row(cost: Cost) -> list[str]:
    judged = sum(r.status in JUDGED for r in cost.records)
    parts = (cost.subject, cost.program, cost.other, cost.drawing)
    return [
        cost.op,
        str(cost.cells),
        str(judged),
        f"{cost.wall:.1f}",
        *(f"{part / cost.wall:.1%}" for part in parts),
        f"{cost.middle(lambda r: r.subject_ms):.2f}",
        f"{cost.middle(lambda r: r.program_ms):.2f}",
        f"{cost.middle(lambda r: r.other_ms):.2f}",
        f"{cost.middle(lambda r: r.program_ms + r.other_ms):.2f}",
    ]


def _peak() -> float:
    """Peak resident set of this process in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
