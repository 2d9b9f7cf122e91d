"""The ordinary cell of a subject that has its own environment, and the same one with a bug."""

from dataclasses import replace
from typing import Any

from harness import cells, known, profiles
from harness.campaign import Absent
from harness.environments.client import Place
from harness.lane import Tier
from harness.record import BAD, Record
from harness.run import Cell, judge
from harness.search import search
from harness.subject import Subject
from tests.planting import Plant, case_of

ACCEPTED = known.load(cells.KNOWN)


def ordinary(name: str) -> Cell:
    """The first cell of the subject; absent where its environment is not built."""
    engine, op, _ = name.split(".")
    cell = next(c for c in cells.cells([op], [engine]) if c.subject.name == name)
    if cell.presence.tier is Tier.ABSENT:
        raise Absent(cell.presence.reason)
    return cell


def planted(plant: Plant, module: str) -> Cell:
    """The same cell, with the bug. module: what holds SUBJECTS with it, in the worker."""
    return beside(plant.subject, plant.planted(), module)


def caught(plant: Plant, module: str) -> tuple[Any, list[Record]]:
    """The smallest case of the bug and all that was judged, in the pre-merge budget and by drawn
    cases alone; the same case is right without the bug."""
    tried: list[Record] = []
    found = search(planted(plant, module), profiles.load("premerge"), 0, tried.append, pinned=False)
    assert found is not None, f"not caught in {len(tried)} cases"
    assert found.status in BAD
    case = case_of(found)
    assert judge(case, ordinary(plant.subject)).status not in BAD
    return case, tried


def beside(name: str, subject: Subject, module: str) -> Cell:
    """The cell of `name` with another subject in its place, known divergences included."""
    right = ordinary(name)
    assert right.place is not None
    place = Place(environment=right.place.environment, command=right.place.command, module=module)
    accepted = tuple(
        replace(entry, subjects=(subject.name,))
        for entry in ACCEPTED
        if entry.op == right.op and name in entry.subjects
    )
    return Cell(
        op=right.op, subject=subject, lane=right.lane, presence=right.presence, place=place,
        known=accepted,
    )  # fmt: skip
