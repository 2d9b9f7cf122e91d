"""A case by the beginning of its id, and the cell that it is to be put to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import cases
from cases.case import Case
from harness import corpus as _corpus
from harness.cells import cells
from harness.given import Given, GivenError
from harness.lane import Tier
from harness.record import BAD, Record
from harness.run import Cell
from harness.rundir import finished, read_run
from reports.usage import UsageError, folder


@dataclass(frozen=True, kw_only=True)
class Found:
    """A case and who failed it. source, options: of a person's own function (harness.corpus)."""

    case: Case
    subject: str
    lane: str
    source: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


def case(prefix: str, *, corpus: Path, runs: Path, run: Path | None) -> Found:
    """The case of the corpus, else of a run: the latest, or the one named.

    Raises:
        UsageError: there is none, several begin so, or it fits its op no more.
        RunError: the run can't be read.
    """
    if run is None:
        try:
            entry = _corpus.find(corpus, prefix)
        except _corpus.CorpusError as error:
            raise UsageError(str(error)) from error
        if entry is not None:
            return Found(
                case=entry.case, subject=entry.subject, lane=entry.lane, source=entry.source,
                options=entry.options,
            )  # fmt: skip
    where = folder(run, runs) if run is not None or finished(runs) else None
    records = [] if where is None else read_run(where)[1]
    hits = [r for r in records if r.case and r.case_id.startswith(prefix)]
    if not hits or not prefix:
        raise UsageError(
            f"case={prefix!r} is neither in {corpus} nor in {where or runs}; expected the "
            "beginning of a case id that a run, a check or a file of the corpus names"
        )
    if len(ids := {record.case_id for record in hits}) > 1:
        raise UsageError(
            f"case={prefix!r} is the beginning of {', '.join(sorted(ids)[:8])}; give more digits"
        )
    record = next((r for r in hits if r.status in BAD), hits[0])
    return Found(case=_case(record), subject=record.subject, lane=record.lane)


def cell(found: Found, subject: str | None = None, lane: str | None = None) -> Cell:
    """The cell that failed, or another subject (or FILE.py:FUNCTION) on its lane.

    Raises:
        UsageError: there is no such cell, it is absent here, or the case is no question for it.
    """
    if found.source and subject is None:
        mine = _given(found, found.source, found.options, lane)
    elif subject is not None and ":" in subject:
        mine = _given(found, subject, {}, lane)
    else:
        mine = _listed(found.case.op, subject or found.subject, lane, found.lane)
    if mine.presence.tier is Tier.ABSENT:
        raise UsageError(
            f"{mine.name} is absent here: {mine.presence.reason}; expected a present cell: "
            "name another with --subject or --lane"
        )
    if why := mine.subject.refuses(found.case):
        raise UsageError(
            f"{mine.name} refuses case {found.case.id}: {why}; expected a subject that claims it: "
            f"`parity explain {found.case.op}` shows them"
        )
    return mine


def notes(found: Found, mine: Cell) -> list[str]:
    """The known divergences that cover the case: a run does not count it."""
    return [f"known divergence {known.id}: {known.why}" for known in mine.divergences(found.case)]


def _case(record: Record) -> Case:
    try:
        return cases.load(record.op).CASE.from_json(record.case)
    except ValueError as error:
        raise UsageError(f"case {record.case_id} fits {record.op} no more: {error}") from error


def _given(found: Found, source: str, options: Mapping[str, str], lane: str | None) -> Cell:
    given = Given.again(source, found.case, lane or found.lane, options)
    try:
        return given.cell()
    except GivenError as error:
        raise UsageError(str(error)) from error


def _listed(op: str, name: str, lane: str | None, usual: str) -> Cell:
    here = [cell for cell in cells([op]) if cell.subject.name == name]
    if not here:
        names = sorted({cell.subject.name for cell in cells([op])})
        raise UsageError(
            f"subject={name!r} is unknown; expected one of {', '.join(names)}, or FILE.py:FUNCTION"
        )
    wanted = [cell for cell in here if cell.lane == (lane or usual)]
    if lane is not None and not wanted:
        raise UsageError(
            f"lane={lane!r} is none of {name}; expected one of {', '.join(c.lane for c in here)}"
        )
    present = [cell for cell in here if cell.presence.tier is not Tier.ABSENT]
    return (wanted or present or here)[0]
