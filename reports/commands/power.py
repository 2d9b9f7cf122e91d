"""`parity power`: what would have been caught, measured by planting what has gone wrong."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import cases
from harness import machine, profiles, rundir
from harness.power import correct
from harness.power.measure import HELD_TO, measure
from harness.power.trial import Tally
from reports import power as report
from reports import usage
from reports.options import OnlyOps, Seed
from reports.power import Measured
from reports.usage import ROOT, UsageError

FOLDER = ROOT / "reports" / "out" / "power"
WIDE = 132
"""Columns of what is printed to a file."""


def power(
    op: OnlyOps = None,
    dtype: Annotated[list[str] | None, typer.Option(help="only this dtype (repeatable)")] = None,
    budget: Annotated[
        int | None, typer.Option(help="cases drawn per defect and dtype (a pre-merge cell's)")
    ] = None,
    seed: Seed = 0,
    held_to: Annotated[
        str, typer.Option(help="envelope: as a kernel that declares nothing; or declared")
    ] = "envelope",
    pinned: Annotated[bool, typer.Option(help="ask the pinned cases too")] = True,
    corpus: Annotated[bool, typer.Option(help="ask the cases of old findings too")] = True,
    right: Annotated[bool, typer.Option(help="put right kernels to all rules too")] = True,
    markdown: Annotated[bool, typer.Option(help="print the summary as Markdown")] = False,
    again: Annotated[
        list[Path] | None,
        typer.Option(help="print what an earlier call left in this folder (repeatable)"),
    ] = None,
    runs: Annotated[Path, typer.Option(help="folder that takes what was measured")] = FOLDER,
) -> None:
    """Plant every defect behind a subject, ask the ordinary cases, and count what is caught.

    Exit code 1 if a defect is never caught, or too few are, or a right kernel is failed.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    if again:
        measured, folder = _together([_read(earlier) for earlier in again]), again[-1]
    else:
        pairs = _pairs(usage.ops(op), dtype)
        count = usage.positive("budget", budget) or profiles.load("premerge").examples
        if held_to not in HELD_TO:
            raise UsageError(f"--held-to {held_to!r}: expected one of {', '.join(HELD_TO)}")
        usage.writable(runs)
        measured, folder = _measure(
            pairs, count, seed, held_to, pinned=pinned, corpus=corpus, right=right, runs=runs
        )
    if markdown:
        print(report.markdown(measured), end="")
    else:
        console.print(report.terminal(measured))
    said = report.findings(measured)
    aside = Console(stderr=True, highlight=False) if markdown else console  # tables are pasted
    for sentence in said:
        aside.print(f"finding: {sentence}", style="red", soft_wrap=True)
    aside.print(str(folder), soft_wrap=True)
    raise typer.Exit(1 if said else 0)


def _pairs(ops: Sequence[str], dtypes: Sequence[str] | None) -> list[tuple[str, str]]:
    """(op, dtype) of everything that is asked for.

    Raises:
        UsageError: a dtype that none of the ops has.
    """
    known = [(op, dtype) for op in ops for dtype in cases.load(op).DTYPES]
    names = tuple(dict.fromkeys(dtype for _, dtype in known))
    for dtype in dtypes or ():
        if dtype not in names:
            raise UsageError(
                f"dtype={dtype!r} is unknown; expected one of {', '.join(names)} for "
                f"{', '.join(ops)}"
            )
    return [pair for pair in known if not dtypes or pair[1] in dtypes]


def _measure(
    pairs: Sequence[tuple[str, str]],
    budget: int,
    seed: int,
    held_to: str,
    *,
    pinned: bool,
    corpus: bool,
    right: bool,
    runs: Path,
) -> tuple[Measured, Path]:
    torch.set_num_threads(1)  # small tensors: threads cost more than they give
    asked = {"budget": budget, "seed": seed, "held_to": held_to, "pinned": pinned, "old": corpus}
    writer = rundir.open_run(runs, {"power": asked, "versions": machine.versions()})
    tallies: list[Tally] = []
    rights: list[correct.Right] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True),
                  transient=True) as bar:  # fmt: skip
        task = bar.add_task("")
        for op, dtype in pairs:
            bar.update(task, description=f"{op} {dtype}: defects")
            tallies += measure(
                op,
                dtype,
                budget,
                held_to=held_to,
                run_seed=seed,
                pinned=pinned,
                old=corpus,
                keep=writer.append,
                step=lambda done, total: bar.update(task, completed=done, total=total),
            )
            if not right:
                continue
            kernels = [cell for cell in correct.kernels(op) if dtype in cell.subject.dtypes]
            bar.update(task, description=f"{op} {dtype}: right kernels", total=len(kernels))
            for number, cell in enumerate(kernels, 1):
                rights.append(correct.right(cell, dtype, budget, seed))
                bar.update(task, completed=number)
    measured = Measured(
        budget=budget, held_to=held_to, tallies=tuple(tallies), rights=tuple(rights)
    )
    return measured, writer.finish({"power": asked | measured.to_json()})


def _together(parts: Sequence[Measured]) -> Measured:
    """Several measurements, of different ops say, as one.

    Raises:
        UsageError: they were made in different ways.
    """
    if len({(part.budget, part.held_to) for part in parts}) > 1:
        said = ", ".join(f"{part.budget} cases held to {part.held_to}" for part in parts)
        raise UsageError(f"--again: {said}; expected measurements of one budget and kind")
    return Measured(
        budget=parts[0].budget,
        held_to=parts[0].held_to,
        tallies=tuple(tally for part in parts for tally in part.tallies),
        rights=tuple(kernel for part in parts for kernel in part.rights),
    )


def _read(folder: Path) -> Measured:
    """What an earlier call left.

    Raises:
        UsageError: it is no folder of `parity power`.
        RunError: it is no run at all.
    """
    info, _ = rundir.read_run(folder)
    try:
        return Measured.from_json(info["power"])
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"--again {folder}: no finished measurement ({error!r}); expected a folder that "
            "`parity power` wrote"
        ) from error
