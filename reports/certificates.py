"""What the cases of a run could not have let pass: the certificates of its programs, as a table.

A certificate follows from the cases of a run and the program, so it is made when it is first asked
for, from the records, and then stays in the run's folder; no kernel runs.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

import cases
from cases.case import Case
from harness.cells import cells
from harness.certificate import Certificate, certify
from harness.files import write_whole
from harness.record import Record, Status
from harness.run import Cell

WEIGHED = 24
"""Cases per program, evenly from those that agreed: fewer can only make a certificate coarser."""
FILE = "certificates.json"
"""In the folder of a finished run."""
Track = Callable[[list[list[Cell]]], Iterable[list[Cell]]]
STRENGTHS = ("sure", "fresh")
NAMED = 3
"""Faults that are named per program: the least certain that can show at all."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The certificates of one program under the cases of the subjects that declare it."""

    op: str
    subjects: tuple[str, ...]
    held_to: str
    certificates: tuple[Certificate, ...]

    @property
    def unseen(self) -> list[str]:
        """Faults that no weighed case shows: features that the subjects do not claim, mostly."""
        return [c.fault for c in self.certificates if not c.shown]

    @property
    def coarsest(self) -> list[Certificate]:
        shown = [c for c in self.certificates if c.shown]
        return sorted(shown, key=lambda c: c.sure, reverse=True)[:NAMED]


def of_run(
    folder: Path, records: Iterable[Record], *, complete: bool, track: Track = iter
) -> list[Row]:
    """The rows kept in the run's folder, else those of its records, kept there if it is complete.

    A folder that can't be written keeps none. track: goes through the programs that are weighed.
    """
    path = folder / FILE
    if path.is_file():
        return [_from_json(row) for row in json.loads(path.read_text(encoding="utf-8"))]
    made = rows(records, track)
    if complete:
        with suppress(OSError):
            write_whole(path, json.dumps([_json(row) for row in made], allow_nan=False) + "\n")
    return made


def _json(row: Row) -> dict[str, Any]:
    """JSON has no infinity: null stands for it."""
    data = asdict(row)
    for fields in data["certificates"]:
        fields |= {n: x if math.isfinite(x) else None for n, x in fields.items() if n in STRENGTHS}
    return data


def _from_json(data: dict[str, Any]) -> Row:
    found = []
    for fields in data["certificates"]:
        fields |= {name: math.inf for name in STRENGTHS if fields[name] is None}
        found.append(Certificate(**fields))
    return Row(**{**data, "subjects": tuple(data["subjects"]), "certificates": tuple(found)})


def rows(records: Iterable[Record], track: Track = iter) -> list[Row]:
    """A row for each program whose subjects agreed in some case of the run and are here."""
    asked: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in records:
        if record.status is Status.AGREE:
            asked.setdefault(record.cell, {})[record.case_id] = record.case
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells(sorted({op for op, _, _ in asked})) if asked else ():
        if (cell.op, cell.subject.name, cell.lane) in asked:
            groups.setdefault((cell.op, id(cell.program)), []).append(cell)
    return [_row(group, asked) for group in track(list(groups.values()))]


def _row(group: Sequence[Cell], asked: dict[tuple[str, str, str], dict[str, str]]) -> Row:
    first = group[0]
    texts: dict[str, str] = {}
    for cell in group:
        texts |= asked[cell.op, cell.subject.name, cell.lane]
    return Row(
        op=first.op,
        subjects=tuple(dict.fromkeys(cell.subject.name for cell in group)),
        held_to=first.held_to,
        certificates=certify(first.op, first.program, _some(first.op, list(texts.values()))),
    )


def _some(op: str, texts: list[str]) -> list[Case]:
    step = max(1, math.ceil(len(texts) / WEIGHED))
    return [cases.load(op).CASE.from_json(text) for text in texts[::step]]


def table(rows: Sequence[Row]) -> Table:
    """For a rich console: strengths in multiples of the whole fault."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("program of", "held to", "cases", "shown", "a defect above this is rejected"):
        out.add_column(name, justify="right" if name in ("cases", "shown") else "left")
    for row in rows:
        more = len(row.subjects) - 1
        said = "\n".join(f"{c.sure:.2g} of {c.fault} (fresh {c.fresh:.2g})" for c in row.coarsest)
        out.add_row(
            row.subjects[0] + (f" and {more} more" if more else ""),
            row.held_to,
            str(max((c.asked for c in row.certificates), default=0)),
            f"{len(row.certificates) - len(row.unseen)}/{len(row.certificates)}",
            said,
        )
    return out
