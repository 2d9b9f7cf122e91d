"""What must be said against a run before it counts as passed: one sentence per finding."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.arithmetic.mode import PROB
from harness.lane import NAMES, Tier
from harness.record import BAD, JUDGED, Record, Status

CellName = tuple[str, str, str]
"""(op, subject, lane)."""

MINIMUM = 1
"""Cases that a cell must have judged where nothing else is asked."""
VACUOUS_CAP = 0.25
"""Share of the asked cases that may be unable to tell; more means that the strategy is at fault."""
SAMPLE = 20
"""Of fewer asked cases a share says nothing."""
FALSE_ALARM = 1e-6
"""How often chance alone may fail one cell for its suspects."""


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A lane that must have judged something; `tier`: how it must have been present, if it must."""

    lane: str
    tier: Tier | None = None

    def __str__(self) -> str:
        return self.lane if self.tier is None else f"{self.lane}:{self.tier}"


def requirement(text: str) -> Requirement:
    """`cuda` or `amx:hardware`, as given to --require-lane.

    Raises:
        ValueError: no such lane or tier.
    """
    lane, colon, tier = text.partition(":")
    if lane not in NAMES:
        raise ValueError(
            f"--require-lane {text}: lane={lane!r} is unknown; expected one of {', '.join(NAMES)}"
        )
    tiers = (Tier.HARDWARE, Tier.EMULATED)
    if colon and tier not in tiers:
        raise ValueError(
            f"--require-lane {text}: tier={tier!r} is unknown; expected one of {', '.join(tiers)}"
        )
    return Requirement(lane=lane, tier=Tier(tier) if colon else None)


def findings(
    records: Sequence[Record],
    *,
    required: Iterable[str] = (),
    engines: Iterable[str] = (),
    cells: Iterable[CellName] = (),
    minimum: int = MINIMUM,
    minimums: Mapping[CellName, int] | None = None,
    lane_minimum: int = MINIMUM,
    vacuous_cap: float = VACUOUS_CAP,
) -> list[str]:
    """Every reason not to pass, worst first; none means that the run passed.

    required: lanes, as for `requirement`. engines: those that must have judged something. cells:
    every cell that was to be asked; one without a record is a finding. minimum: cases that each
    present cell must judge, unless `minimums` names another number for it. lane_minimum: the same
    for each required lane and engine as a whole.

    Raises:
        ValueError: an unknown required lane.
    """
    demands = [requirement(text) for text in required]
    if not records:
        return ["nothing was judged: there is no record at all; check -k, -m and the engines"]
    by_cell: dict[CellName, list[Record]] = defaultdict(list)
    for record in records:
        by_cell[record.cell].append(record)
    out: list[str] = []
    for demand in demands:
        out += _lane(demand, records, lane_minimum)
    for engine in engines:
        out += _engine(engine, records, lane_minimum)
    for cell in dict.fromkeys([*by_cell, *cells]):
        least = (minimums or {}).get(cell, minimum)
        out += _cell(cell, by_cell.get(cell, []), least, vacuous_cap)
    return out


def suspects_by_chance(elements: int) -> int:
    """How many suspects chance may leave among cases with so many judged elements in all.

    A correct kernel's element lies outside its prob radius with probability at most
    p = 2 exp(-sigmas**2 / 2) (harness.arithmetic.mode: 3e-8). A suspect needs at least one such
    element, so with mu = p * elements their number has the tail of a Poisson count at most:
    P(count >= k) <= (e mu / k)**k for k > mu (Chernoff). The largest number that is still chance
    is the last k whose successor has a bound below FALSE_ALARM.
    """
    mu = 2 * math.exp(-(PROB.sigmas**2) / 2) * elements
    count = 0
    while True:
        more = count + 1
        if more > mu and (math.e * mu / more) ** more < FALSE_ALARM:
            return count
        count = more


def _lane(demand: Requirement, records: Sequence[Record], least: int) -> list[str]:
    """What the required lane lacks."""
    here = [record for record in records if record.lane == demand.lane]
    said = f"--require-lane {demand}"
    if all(record.status is Status.ABSENT for record in here):
        reasons = Counter(record.why for record in here)
        why = "; ".join(reason for reason, _ in reasons.most_common())
        return [f"{said}: absent: {why or 'no subject was put to it'}"]
    judged = [record for record in here if record.status in JUDGED]
    if demand.tier is not None:
        fitting = [record for record in judged if record.tier == demand.tier]
        if judged and not fitting:
            tiers = ", ".join(sorted({record.tier for record in judged}))
            return [f"{said}: the lane ran {tiers}, not on {demand.tier}"]
        judged = fitting
    if len(judged) < least:
        return [f"{said}: judged {len(judged)} cases, expected at least {least}"]
    return []


def _engine(engine: str, records: Sequence[Record], least: int) -> list[str]:
    """What the required engine lacks."""
    mine = [record for record in records if record.subject.split(".", 1)[0] == engine]
    said = f"--require-engine {engine}"
    if all(record.status is Status.ABSENT for record in mine):
        reasons = Counter(record.why for record in mine)
        why = "; ".join(reason for reason, _ in reasons.most_common())
        return [f"{said}: absent: {why or 'no subject of it was asked'}"]
    judged = sum(record.status in JUDGED for record in mine)
    if judged < least:
        return [f"{said}: judged {judged} cases, expected at least {least}"]
    return []


def _cell(cell: CellName, records: Sequence[Record], least: int, vacuous_cap: float) -> list[str]:
    """What is wrong with one cell."""
    _, subject, lane = cell
    said = f"{subject}@{lane}"
    if not records:
        return [f"{said}: no record: the cell was to be asked and was not"]
    if all(record.status is Status.ABSENT for record in records):
        return []
    out = [_bad(said, records, status) for status in sorted(BAD, key=_WORST.index)]
    out = [sentence for sentence in out if sentence]
    count = Counter(record.status for record in records)
    judged = sum(count[status] for status in JUDGED)
    asked = judged + count[Status.VACUOUS]
    if judged == 0 and count[Status.REFUSED]:
        reasons = Counter(r.why for r in records if r.status is Status.REFUSED)
        reason, _ = reasons.most_common(1)[0]
        out.append(f"{said}: refused all {count[Status.REFUSED]} cases, mostly: {reason}")
    elif judged == 0 or judged + count[Status.KNOWN] < least:
        # Known cases are pinned by a test of their own; alone they are no evidence.
        out.append(
            f"{said}: judged {judged} cases, expected at least {least} "
            f"({_others(count) or 'nothing else was asked'})"
        )
    if asked >= SAMPLE and count[Status.VACUOUS] / asked > vacuous_cap:
        reasons = Counter(r.why for r in records if r.status is Status.VACUOUS)
        reason, _ = reasons.most_common(1)[0]
        out.append(
            f"{said}: {count[Status.VACUOUS]} of {asked} cases could not tell right from wrong, "
            f"more than {vacuous_cap:.0%}; mostly: {reason}"
        )
    elements = sum(record.elements for record in records)
    if count[Status.SUSPECT] > (most := suspects_by_chance(elements)):
        out.append(
            f"{said}: {count[Status.SUSPECT]} suspects among {elements} elements, chance explains "
            f"at most {most}: the declared arithmetic is too narrow"
        )
    return out


_WORST = (Status.DISAGREE, Status.ERROR, Status.DRIFT)


def _bad(said: str, records: Sequence[Record], status: Status) -> str:
    """One sentence on the records of a bad status: how many, and the worst."""
    hit = [record for record in records if record.status is status]
    if not hit:
        return ""
    worst = max(hit, key=lambda record: record.excess)
    lines = worst.why.splitlines() or ["no reason given"]
    why = lines[-1] if status is Status.ERROR else lines[0]  # of a traceback, the exception
    return f"{said}: {status} in {_cases(len(hit))}; e.g. case {worst.case_id}: {why.strip()}"


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count} cases"


def _others(count: Counter[Status]) -> str:
    return ", ".join(f"{n} {status}" for status, n in count.items() if status not in JUDGED)
