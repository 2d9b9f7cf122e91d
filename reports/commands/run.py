"""`parity run`: put the cells to the question; pytest does it, this names the tests and options."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cells import cells
from harness.corpus import FOLDER
from harness.rundir import RunError, finished, read_info
from reports import usage
from reports.options import AskedFindings, OnlyOps
from reports.usage import ROOT, RUNS, UsageError


def run(
    op: OnlyOps = None,
    engine: Annotated[list[str] | None, typer.Option(help="only this engine (repeatable)")] = None,
    lane: Annotated[list[str] | None, typer.Option(help="only this lane (repeatable)")] = None,
    profile: Annotated[str, typer.Option(help="premerge, nightly or fuzz: how much is asked")] = (
        "premerge"
    ),
    cases: Annotated[int | None, typer.Option(help="cases drawn per cell")] = None,
    seed: Annotated[int | None, typer.Option(help="of what is drawn")] = None,
    workers: Annotated[str, typer.Option(help="processes: a number, or auto")] = "auto",
    require_lane: Annotated[
        list[str] | None,
        typer.Option(help="fail if this lane judged too little: cuda, amx:hardware (repeatable)"),
    ] = None,
    require_engine: Annotated[
        list[str] | None,
        typer.Option(help="fail if this engine judged too little (repeatable)"),
    ] = None,
    runs: Annotated[Path, typer.Option(help="folder that takes the run's folder")] = RUNS,
    no_pinned: Annotated[
        bool, typer.Option("--no-pinned", help="do not ask the pinned cases")
    ] = False,
    no_corpus: Annotated[
        bool, typer.Option("--no-corpus", help="neither ask nor keep old findings")
    ] = False,
    corpus: AskedFindings = FOLDER,
) -> None:
    """Judge every cell, print the matrix and the folder of the run; pytest's exit code."""
    ops, engines, lanes = usage.ops(op), usage.engines(engine), usage.lanes(lane)
    options = {
        "--profile": usage.profile(profile),
        "--cases": usage.positive("cases", cases),
        "--seed": seed,
        "--runs": runs.resolve(),
        "--corpus": corpus.resolve(),
    }
    switches = [word for word, on in (("--no-pinned", no_pinned), ("--no-corpus", no_corpus)) if on]
    required, processes = usage.required(require_lane), _workers(workers)
    demanded = usage.engines(require_engine) or ()
    usage.writable(runs)
    words = _pytest(
        ops=_asked(ops, engines, lanes),
        engines=engines,
        lanes=lanes,
        options=options,
        required=required,
        demanded=demanded,
        workers=processes,
    )
    raise typer.Exit(_code([sys.executable, "-m", "pytest", *words, *switches], runs.resolve()))


def _code(command: list[str], runs: Path) -> int:
    """Run the command to its end and return its exit code; 1 where it passed without a run.

    Ctrl-C reaches the child as well; it is given the time to close the run.
    """
    before = set(finished(runs))
    child = subprocess.Popen(command, cwd=ROOT)
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            code = child.wait()
            break
    if code == 0 and not any(_pid(run) == child.pid for run in set(finished(runs)) - before):
        print(
            f"parity: the run ended with exit code 0 before it was finished: {runs} has no folder "
            "of it; a subject that ends the process is at fault: `--workers 2` names the cell",
            file=sys.stderr,
        )
        return 1
    return code


def _pid(run: Path) -> int | None:
    """The process that finished the run."""
    try:
        return read_info(run).get("pid")
    except RunError:
        return None


def _asked(
    ops: tuple[str, ...], engines: tuple[str, ...] | None, lanes: tuple[str, ...] | None
) -> tuple[str, ...]:
    """The ops of which there is a cell.

    Raises:
        UsageError: there is none of any.
    """
    found = {cell.op for cell in cells(ops, engines, lanes)}
    if not found:
        words = (("op", ops), ("engine", engines), ("lane", lanes))
        said = ", ".join(f"{name}={'|'.join(values)}" for name, values in words if values)
        raise UsageError(
            f"no cell has {said}; expected a combination that some engine offers: "
            "`parity explain OP` shows the subjects of an op and their lanes"
        )
    return tuple(op for op in ops if op in found)


def _pytest(
    *,
    ops: tuple[str, ...],
    engines: tuple[str, ...] | None,
    lanes: tuple[str, ...] | None,
    options: dict[str, object],
    required: list[str],
    demanded: tuple[str, ...],
    workers: str,
) -> list[str]:
    """The words of the pytest command."""
    files = [f"tests/test_{op}.py" for op in ops]
    if missing := [file for file in files if not (ROOT / file).is_file()]:
        raise UsageError(
            f"{ROOT / missing[0]} is missing: `parity run` needs the checkout with its tests; "
            "install it with `pip install -e .` there"
        )
    words = [*files, "-q", "-p", "reports.progress"]
    words += [f"--engine={name}" for name in engines or ()]
    words += ["-m", " or ".join(lanes)] if lanes else []
    words += [f"{name}={value}" for name, value in options.items() if value is not None]
    words += [f"--require-lane={text}" for text in required]
    words += [f"--require-engine={name}" for name in demanded]
    return words if workers == "1" else [*words, "-n", workers]


def _workers(text: str) -> str:
    if text == "auto" or (text.isdecimal() and int(text) >= 1):
        return text
    raise UsageError(f"--workers {text!r}: expected a number from 1, or auto")
