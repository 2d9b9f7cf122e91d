"""Every cell that the tree of engines offers: a subject on each of its lanes, present or not."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness import engines, known, lane, runtimes
from harness.environments import declared as environments
from harness.environments.client import Place
from harness.environments.store import Store
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
            mine = tuple(entry for entry in accepted if entry.op == op)
            for subject, seat in _subjects(engine, op):
                found += [
                    Cell(
                        op=op,
                        subject=subject,
                        lane=where,
                        presence=_presence(subject, where, seat),
                        place=seat.place,
                        known=mine,
                    )
                    for where in subject.lanes
                    if lanes is None or where in lanes
                ]
    return tuple(sorted(found, key=lambda cell: (cell.op, cell.subject.name, cell.lane)))


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """Where an engine is: in this process, in a worker (`place` and the `lanes` that it has), or
    nowhere, with the reason."""

    missing: str = ""
    place: Place | None = None
    lanes: Mapping[str, Mapping[str, Presence]] = field(default_factory=dict)


def _subjects(engine: str, op: str) -> list[tuple[Subject, _Seat]]:
    """Subjects, each with its seat."""
    reason = engines.absent(engine)
    if reason is None:
        return [(subject, _Seat()) for subject in engines.subjects(engine, op)]
    declared = environments.serving(engine)
    if declared is None:
        nobody = Subject(
            name=f"{engine}.{op}.*",
            run=lambda case, tensors: {},
            claims=frozenset(),
            dtypes=(),
            lanes=engines.lanes(engine),
        )
        return [(nobody, _Seat(missing=reason))]
    ready = Store().find(declared)
    if ready is None:
        seat = _Seat(missing=f"no environment: `{declared.remedy}` builds it")
    else:
        module = f"harness.engines.{engine}.{op}"
        place = Place(environment=declared.name, command=ready.command, module=module)
        seat = _Seat(place=place, lanes=ready.facts.lanes)
    return [(subject, seat) for subject in engines.subjects(engine, op)]


def _presence(subject: Subject, where: str, seat: _Seat) -> Presence:
    if seat.missing:
        return Presence(tier=Tier.ABSENT, reason=seat.missing)
    if seat.place is None:
        presence = runtimes.presence(subject.runtime, where)
    else:
        presence = seat.lanes[subject.runtime][where]
    if where in subject.emulated:  # whatever the machine has, this subject does not use it
        return Presence(
            tier=Tier.EMULATED,
            device="cpu",
            reason=presence.reason or "emulated by the subject in software",
        )
    return presence
