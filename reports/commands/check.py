"""`parity check`: judge a person's own function, without a file of the harness's around it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import cases as _cases
from harness import corpus as _corpus
from harness import gate, machine, signatures
from harness.given import Given, GivenError, ProgramError
from harness.given import dtype as _dtype
from harness.profiles import Profile
from harness.record import Record
from harness.run import Cell
from harness.search import search
from reports import finding, matrix, usage
from reports.options import AskedFindings, Seed
from reports.usage import UsageError

PROFILE = Profile(
    name="check", examples=200, slow_examples=200, large=False, seed=0, least=50, vacuous=0.25
)
"""More than a cell gets before a merge: there is one, and nothing is known of it."""


def check(
    source: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="what to judge")],
    op: Annotated[str, typer.Option(help="what it computes, such as sdpa")],
    features: Annotated[
        str | None, typer.Option(help="ask about these only: causal,window (else: all it takes)")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="only this format: bf16, fp16, fp32 (repeatable)")
    ] = None,
    lane: Annotated[str | None, typer.Option(help="where it runs: cpu, cuda, mps, amx")] = None,
    runtime: Annotated[str, typer.Option(help="whose tensors it takes: torch or mlx")] = "torch",
    program: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:PROGRAM", help="its arithmetic; else what its dtypes allow"),
    ] = None,
    cases: Annotated[int | None, typer.Option(help="cases drawn (200)")] = None,
    seed: Seed = 0,
    corpus: AskedFindings = _corpus.FOLDER,
) -> None:
    """Judge a function of your own; `parity explain OP` shows the arguments that it may take.

    Nothing has to be written around it: a function that takes `window` is asked about windows. What
    is found wrong is named, made as small as it gets, and kept, to be replayed.
    """
    (name,) = usage.ops([op])
    given = Given(
        source=usage.resolved(source),
        op=name,
        runtime=usage.runtime(runtime),
        lane="" if lane is None else (usage.lanes([lane]) or ("",))[0],
        features=None if features is None else tuple(_words(features)),
        dtypes=tuple(_dtype(text) for text in dtype or ()),
        program=usage.resolved(usage.said("--program", program) or ""),
    )
    count = usage.positive("cases", cases) or PROFILE.examples
    try:
        cell = given.cell()
    except GivenError as error:
        raise UsageError(str(error)) from error
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in _asked(given, cell):
        console.print(line)
    entries, notes = _corpus.read(corpus, name)
    for note in notes:
        console.print(f"note: {note}", style="yellow")
    records: list[Record] = []
    known = len(entries) + len(_cases.load(name).PINNED)
    try:
        with _progress(known + count) as step:
            found = search(
                cell,
                PROFILE,
                seed,
                lambda record: (records.append(record), step())[0],
                examples=count,
                corpus=[entry.case for entry in entries],
            )
    except ProgramError as error:
        raise UsageError(str(error)) from error
    print(matrix.text(records, colour=console.is_terminal), end="")
    if found is not None:
        console.print("It stops at a finding: what comes after is not asked.")
        for line in finding.lines(found):
            console.print(line)
        for line in _kept(corpus, given, found):
            console.print(line)
        raise typer.Exit(1)
    least = max(1, count * PROFILE.least // PROFILE.examples)
    said = gate.findings(records, minimum=least, vacuous_cap=PROFILE.vacuous)
    for line in said:
        console.print(f"finding: {line}", style="red")
    raise typer.Exit(1 if said else 0)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _asked(given: Given, cell: Cell) -> list[str]:
    """What is put to the function, and what is not."""
    module, subject = signatures.load(given.op), cell.subject
    on = sorted(subject.claims)
    free = sorted(set(module.FREE) - subject.claims)
    able = {f for p in module.PARAMETERS.values() for f in p.features}
    off = sorted(able - subject.claims - set(free))
    out = [
        f"{subject.name}@{cell.lane} ({cell.presence.tier}), in {', '.join(subject.dtypes)}",
        f"asked about: {', '.join(on) or 'the plain op'}",
    ]
    if off:
        out.append(f"not asked about: {', '.join(off)}")
    if free:
        out.append(f"asked with --features only: {', '.join(free)}")
    return out


def _kept(corpus: Path, given: Given, found: Record) -> list[str]:
    """Save the finding; what to type next, or why it is not saved."""
    entry = _corpus.Entry.of(
        found, machine.versions(), source=given.source, options=given.options()
    )
    try:
        _corpus.save(corpus, entry)
    except _corpus.CorpusError as error:
        return [f"not saved: {error}"]
    return finding.next_commands(found.case_id, corpus)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar of the cases that are judged, on a terminal; gone when it is done."""
    columns = TextColumn("judging"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("judging", total=total)
        yield lambda: bar.advance(task)
