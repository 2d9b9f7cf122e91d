"""`parity explain`: what an op means, what can be asked of it, and who answers."""

import contextlib
import importlib
import inspect
import textwrap
from dataclasses import fields, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import cases
from cases.case import Case
from harness import signatures
from harness.cells import cells
from harness.run import Cell
from reports import usage


def explain(op: Annotated[str, typer.Argument(help="an op, such as sdpa")]) -> None:
    """Print an op's contract, features, outputs and subjects."""
    (name,) = usage.ops([op])
    module = cases.load(name)
    console = Console(highlight=False, markup=False)
    console.print(f"{name}: {_first_line(module)}\n", style="bold")
    for place, said in _meaning(name).items():
        console.print(place, style="bold")
        console.print(textwrap.indent(said, "  ") + "\n", soft_wrap=True)
    console.print("Features", style="bold")
    console.print(_pairs(module.FEATURES))
    if placement := getattr(importlib.import_module(f"harness.programs.{name}"), "PLACEMENT", {}):
        console.print("Where each engine puts it", style="bold")
        console.print(_pairs(placement))
    console.print("Outputs", style="bold")
    console.print(_pairs(_outputs(module)))
    console.print("Pinned cases", style="bold")
    console.print(_pairs({pin: case.to_json() for pin, case in module.PINNED}))
    console.print("Arguments of your own function", style="bold")
    console.print(f"  parity check FILE.py:FUNCTION --op {name}; by keyword, any of\n")
    console.print(_pairs(_arguments(name)))
    console.print("Subjects", style="bold")
    for subject, here in _by_subject(cells(ops=[name])).items():
        console.print(f"  {subject}")
        console.print(_pairs(_subject(here)))


def _first_line(module: Any) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def _meaning(op: str) -> dict[str, str]:
    """The docstrings of the reference that state a contract, by where they stand."""
    module = importlib.import_module(f"references.{op}")
    parts = {module.__name__: module} | {
        f"{module.__name__}.{f.__name__}": f
        for f in vars(module).values()
        if inspect.isfunction(f) and f.__module__ == module.__name__
    }
    docs = {place: inspect.getdoc(part) or "" for place, part in parts.items()}
    return {place: said for place, said in docs.items() if "**Contract**" in said}


def _arguments(op: str) -> dict[str, str]:
    """What a person's own function may take and what it returns."""
    module = signatures.load(op)
    said = {
        name: f"{'needed: ' if parameter.needed else ''}{parameter.meaning}"
        for name, parameter in module.PARAMETERS.items()
    }
    free = ", ".join(module.FREE)
    more = {"--features": f"asked only if named there: {free}"} if free else {}
    return {**said, "returns": module.RETURNS, **more}


def _outputs(module: Any) -> dict[str, str]:
    """Dtypes by output name, over the pinned cases and with every yes-or-no feature on."""
    found: dict[str, set[str]] = {}
    switches = [f.name for f in fields(module.CASE) if f.default is False]
    for _, case in module.PINNED:
        for asked in (case, *_with(case, switches)):
            for name, dtype in asked.output_dtypes().items():
                found.setdefault(name, set()).add(dtype)
    return {name: ", ".join(sorted(dtypes)) for name, dtypes in found.items()}


def _with(case: Case, switches: list[str]) -> list[Case]:
    """The case with each switch on in turn, where it may be."""
    out = []
    for name in switches:
        with contextlib.suppress(ValueError):
            out.append(replace(case, **{name: True}))
    return out


def _pairs(meaning: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 3), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, said in meaning.items():
        table.add_row(name, said)
    table.add_row()
    return table


def _by_subject(found: tuple[Cell, ...]) -> dict[str, list[Cell]]:
    out: dict[str, list[Cell]] = {}
    for cell in found:
        out.setdefault(cell.subject.name, []).append(cell)
    return out


def _subject(here: list[Cell]) -> dict[str, str]:
    """What one subject says of itself, and how its lanes are present."""
    subject = here[0].subject
    return {
        "lanes": "; ".join(_lane(cell) for cell in here),
        "claims": ", ".join(sorted(subject.claims)) or "-",
        "dtypes": ", ".join(subject.dtypes) or "-",
        "program": f"declared on {', '.join(subject.programs)}; the envelope elsewhere"
        if subject.programs
        else "the envelope",
    }


def _lane(cell: Cell) -> str:
    reason = f" ({cell.presence.reason})" if cell.presence.reason else ""
    return f"{cell.lane} {cell.presence.tier}{reason}"
