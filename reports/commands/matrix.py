"""`parity matrix`: the matrix of a run that has been."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.console import Console
from rich.progress import track

from harness.certificate import MISS
from harness.run import Cell
from harness.rundir import read_run
from reports import certificates as certified
from reports import matrix as table
from reports import usage
from reports.options import Runs
from reports.usage import RUNS


def matrix(
    run: Annotated[
        Path | None, typer.Argument(help="folder or name of a run; the latest if left out")
    ] = None,
    runs: Runs = RUNS,
    markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown")] = False,
    certificates: Annotated[
        bool,
        typer.Option("--certificates", help="print what its cases could not have let pass"),
    ] = False,
) -> None:
    """Print the matrix of a run: subject by lane, what was judged, how far from the limit."""
    folder = usage.folder(run, runs)
    info, records = read_run(folder)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    if certificates:
        rows = certified.of_run(folder, records, complete=info["complete"], track=_tracked)
        if not rows:
            print("No case of this run agreed with a subject that is here: nothing is certified.")
            return
        console.print(certified.table(rows))
        print(
            "In multiples of a whole fault of cases/defects: by the cases of this run, and by as "
            f"many fresh ones with a miss below {MISS:g}. Other faults that show are seen when "
            "smaller."
        )
        return
    if markdown:
        print(table.markdown(records), end="")
        return
    console.print(table.terminal(records))
    for note in info["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False)
    if not info["complete"]:
        console.print("This run was not finished.", style="yellow")
    if info.get("exit") == pytest.ExitCode.INTERRUPTED:
        console.print("This run was interrupted: not every cell got its cases.", style="yellow")
    console.print(str(folder), markup=False, soft_wrap=True)


def _tracked(programs: list[list[Cell]]) -> Iterator[list[Cell]]:
    """A bar on a terminal: all programs of a run take minutes."""
    console = Console(stderr=True)
    yield from track(programs, description="weighing", console=console, transient=True)
