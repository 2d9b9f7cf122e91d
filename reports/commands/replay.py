"""`parity replay`: put a case that was a finding to the subject again."""

from typing import Annotated

import typer
from rich.console import Console

from harness import corpus as _corpus
from harness.record import BAD
from harness.run import ask
from reports import finding, lookup, usage
from reports.options import CaseId, Findings, InRun, OnLane, Runs
from reports.usage import RUNS


def replay(
    case: CaseId,
    subject: Annotated[
        str | None, typer.Option(help="ask this subject, or FILE.py:FUNCTION, instead")
    ] = None,
    lane: OnLane = None,
    run: InRun = None,
    runs: Runs = RUNS,
    corpus: Findings = _corpus.FOLDER,
) -> None:
    """Ask one case again, of the subject that failed; exit code 1 while it is wrong.

    The case is looked up in the corpus, then in the latest run.
    """
    subject, lane = usage.said("--subject", subject), usage.said("--lane", lane)
    found = lookup.case(case, corpus=corpus, runs=runs, run=run)
    cell = lookup.cell(found, subject, lane)
    record = ask(found.case, cell)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in finding.lines(record):
        console.print(line)
    for line in lookup.notes(found, cell):
        console.print(f"note: {line}", style="yellow")
    raise typer.Exit(1 if record.status in BAD else 0)
