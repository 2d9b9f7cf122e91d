"""`parity repro`: a finding as one script that needs torch and the engine only."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from harness import corpus as _corpus
from harness import machine
from harness.record import BAD
from harness.run import ask
from reports import lookup, usage
from reports.options import CaseId, Findings, InRun, OnLane, Runs
from reports.repro import script
from reports.repro.bundle import BundleError
from reports.usage import RUNS, UsageError


def repro(
    case: CaseId,
    output: Annotated[Path, typer.Option("--output", "-o", help="the script to write")],
    subject: Annotated[
        str | None, typer.Option(help="of this subject, or FILE.py:FUNCTION, instead")
    ] = None,
    lane: OnLane = None,
    run: InRun = None,
    runs: Runs = RUNS,
    corpus: Findings = _corpus.FOLDER,
) -> None:
    """Write a script that fails the same way on its own; it prints observed, expected and fault."""
    subject, lane = usage.said("--subject", subject), usage.said("--lane", lane)
    found = lookup.case(case, corpus=corpus, runs=runs, run=run)
    cell = lookup.cell(found, subject, lane)
    again = f"`parity replay {found.case.id}` asks it here"
    record = ask(found.case, cell)
    if record.status not in BAD:
        raise UsageError(
            f"{cell.name} answers case {found.case.id} with {record.status} now; expected a case "
            f"that is still wrong: {again}"
        )
    source = subject if subject is not None and ":" in subject else found.source
    try:
        text = script.write(
            found.case, cell, record, "" if subject and ":" not in subject else source,
            machine.versions(),
        )  # fmt: skip
    except script.TooLarge as error:
        raise UsageError(f"{error}; expected a shrunk case: {again}") from error
    except BundleError as error:
        raise UsageError(
            f"the call of {cell.name} can't be written down ({error}); expected functions that "
            f"have names: {again}"
        ) from error
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"-o {output} can't be written ({error.strerror or error}); expected the path of a "
            "new script"
        ) from error
    python = ["python"] if cell.place is None else list(cell.place.command)
    command = shlex.join([*python, str(output)])
    print(f"{output}: run it with `{command}`; exit code 1 while the answer is wrong")
