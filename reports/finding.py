"""A finding as a person reads it: what is wrong, where, the smallest case, and how to go on."""

import shlex
from pathlib import Path

from harness.corpus import FOLDER
from harness.record import BAD, Record, Status

SHOWN = 600
"""Characters of a case that are shown."""


def lines(record: Record) -> list[str]:
    """Status, then fault and place, then the case; a traceback as it is."""
    said = record.why if record.status is Status.ERROR else record.why.replace("; ", "\n  ")
    shown = record.case if len(record.case) <= SHOWN else f"{record.case[:SHOWN]} ..."
    out = [f"{record.subject}@{record.lane} ({record.tier}): {record.status}"]
    if said:
        out += [f"  {line}" for line in said.splitlines()]
    elif record.status is Status.AGREE:
        out.append(f"  {record.excess:.3g} x what is allowed, of {record.elements} elements")
    kind = "smallest case" if record.status in BAD else "case"
    return [*out, f"{kind} {record.case_id}: {shown}"]


def next_commands(case_id: str, corpus: Path) -> list[str]:
    """What to type next; corpus: where the case is kept."""
    there = "" if corpus == FOLDER else f" --corpus {shlex.quote(str(corpus))}"
    return [
        f"again: parity replay {case_id}{there}",
        f"alone: parity repro {case_id} -o repro.py{there}",
    ]
