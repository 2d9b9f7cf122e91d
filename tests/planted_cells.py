"""The ordinary cell of a subject that has its own environment, and the same one with a bug."""

from dataclasses import replace

from harness import cells, known
from harness.campaign import Absent
from harness.environments.client import Place
from harness.lane import Tier
from harness.run import Cell
from harness.subject import Subject
from tests.planting import Plant

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
