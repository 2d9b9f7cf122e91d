"""Records added up: one row per cell, one sentence per lane, absent cells by their reason."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from harness.lane import NAMES, Tier
from harness.record import BAD, JUDGED, Record, Status

_TIERS = [tier.value for tier in Tier]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one cell came to.

    program: "declared" where the arithmetic is replicated, "envelope" where the dtypes bound it,
        "" where the run does not say. count: cases by status. excess: the largest of the cases
        that stand (known divergences have none). exact, elements: as in Record, added up.
    """

    op: str
    subject: str
    lane: str
    tier: str
    program: str
    count: Counter[Status]
    excess: float
    exact: int
    elements: int

    @property
    def judged(self) -> int:
        return sum(self.count[status] for status in JUDGED)

    @property
    def bad(self) -> int:
        return sum(self.count[status] for status in BAD)

    @property
    def share(self) -> float | None:
        """Share of elements equal to the program's own rounding; None when none was compared."""
        return self.exact / self.elements if self.elements else None


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Cells that can't run here for the same reason."""

    lane: str
    reason: str
    subjects: tuple[str, ...]


def rows(records: Iterable[Record]) -> list[Row]:
    """The cells that were asked, by op, subject and lane."""
    cells: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.status is not Status.ABSENT:
            cells[record.cell].append(record)
    return [
        Row(
            op=op,
            subject=subject,
            lane=lane,
            tier=here[0].tier,
            program=here[0].program,
            count=Counter(record.status for record in here),
            excess=max(record.excess for record in here),
            exact=sum(record.exact for record in here),
            elements=sum(record.elements for record in here),
        )
        for (op, subject, lane), here in sorted(
            cells.items(), key=lambda item: (*item[0][:2], NAMES.index(item[0][2]))
        )
    ]


def absences(records: Iterable[Record]) -> list[Absence]:
    """The cells that could not be asked, those with one reason together."""
    groups: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for record in records:
        if record.status is Status.ABSENT:
            groups[record.lane, record.why][record.subject] = None
    return [
        Absence(lane=lane, reason=reason, subjects=tuple(subjects))
        for (lane, reason), subjects in sorted(
            groups.items(), key=lambda item: (NAMES.index(item[0][0]), item[0][1])
        )
    ]


def accepted(records: Iterable[Record]) -> dict[str, Counter[str]]:
    """Cases of accepted divergences: op -> id of the entry in known.toml -> how many."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        if record.status is Status.KNOWN:
            found[record.op][record.why.partition(":")[0]] += 1
    return dict(sorted(found.items()))


def lanes(records: Iterable[Record]) -> list[str]:
    """One sentence per lane that any cell has: how it was there, what was judged, what is wrong."""
    kept = list(records)
    return [_lane(name, [r for r in kept if r.lane == name]) for name in NAMES if _any(kept, name)]


def _any(records: list[Record], lane: str) -> bool:
    return any(record.lane == lane for record in records)


def _lane(name: str, records: list[Record]) -> str:
    asked = [record for record in records if record.status is not Status.ABSENT]
    missing = {record.cell: record.why for record in records if record.status is Status.ABSENT}
    reasons = "; ".join(dict.fromkeys(missing.values()))
    if not asked:
        return f"{name}: absent: {reasons} ({_count(len(missing), 'cell')})"
    tiers = " and ".join(sorted({r.tier for r in asked}, key=_TIERS.index))
    count = Counter(record.status for record in asked)
    judged = sum(count[status] for status in JUDGED)
    wrong = [f"{count[status]} {status}" for status in Status if status in BAD and count[status]]
    more = [
        f"{count[s]} {s}"
        for s in (Status.SUSPECT, Status.KNOWN, Status.VACUOUS, Status.REFUSED)
        if count[s]
    ]
    cells = len({record.cell for record in asked})
    said = f"{name}: {tiers}, {_count(cells, 'cell')} judged {_count(judged, 'case')}"
    said += f" ({', '.join(more)})" if more else ""
    said += f": {', '.join(wrong)}" if wrong else ": nothing wrong" if judged else ""
    return said + (f"; {_count(len(missing), 'cell')} absent: {reasons}" if missing else "")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
