"""Every cell that the tree of engines offers: a subject on each of its lanes, present or not."""

from collections.abc import Collection
from pathlib import Path

from harness import engines, known, lane, runtimes
from harness.lane import Presence, Tier
from harness.run import Cell
from harness.subject import Subject

KNOWN = Path(__file__).resolve().parent.parent / "reports" / "known.toml"


def cells(
    ops: Collection[str] | None = None,
    names: Collection[str] | None = None,
    lanes: Collection[str] | None = None,
) -> tuple[Cell, ...]:
    """All cells, or those of some ops, engines (`names`) and lanes, in a stable order.

    Raises:
        EngineError: an adapter is broken.
        ValueError: an unknown engine, lane or op; known.toml is wrong.
    """
    if unknown := sorted(set(lanes or ()) - set(lane.NAMES)):
        raise ValueError(f"lane={unknown[0]!r} is unknown; expected one of {', '.join(lane.NAMES)}")
    accepted = known.load(KNOWN) if KNOWN.exists() else ()
    found = []
    for engine in sorted(names) if names is not None else engines.NAMES:
        for op in engines.ops(engine):
            if ops is not None and op not in ops:
                continue
            for subject, missing in _subjects(engine, op):
                for where in subject.lanes:
                    if lanes is None or where in lanes:
                        presence = (
                            Presence(tier=Tier.ABSENT, reason=missing)
                            if missing
                            else _presence(subject, where)
                        )
                        mine = tuple(entry for entry in accepted if entry.op == op)
                        found.append(
                            Cell(op=op, subject=subject, lane=where, presence=presence, known=mine)
                        )
    return tuple(sorted(found, key=lambda cell: (cell.op, cell.subject.name, cell.lane)))


def _subjects(engine: str, op: str) -> list[tuple[Subject, str]]:
    """Subjects with the reason why they are absent, "" when they are not."""
    if reason := engines.absent(engine):
        nobody = Subject(
            name=f"{engine}.{op}.*",
            run=lambda case, tensors: {},
            claims=frozenset(),
            dtypes=(),
            lanes=engines.lanes(engine),
        )
        return [(nobody, reason)]
    return [(subject, "") for subject in engines.subjects(engine, op)]


def _presence(subject: Subject, where: str) -> Presence:
    presence = runtimes.presence(subject.runtime, where)
    if where in subject.emulated:  # whatever the machine has, this subject does not use it
        return Presence(
            tier=Tier.EMULATED,
            device="cpu",
            reason=presence.reason or "emulated by the subject in software",
        )
    return presence
