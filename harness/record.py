"""What is kept of every judged case: one JSON line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import cases
from harness import lane

FORMAT = 2
"""The version of the record's fields; a reader refuses a newer one."""


class Status(StrEnum):
    """What came of putting one case to one subject."""

    AGREE = "agree"
    SUSPECT = "suspect"  # outside prob, inside det, and not repeated with fresh values
    DRIFT = "drift"  # inside the envelope, outside the declared arithmetic
    DISAGREE = "disagree"
    ERROR = "error"  # raised, hung, or ran another kernel
    REFUSED = "refused"  # the subject does not claim it
    VACUOUS = "vacuous"  # the case can't tell
    KNOWN = "known"  # an accepted divergence of reports/known.toml
    ABSENT = "absent"  # the cell can't run here


class Newer(ValueError):
    """A record that a later version wrote; the message says what to do."""


JUDGED = frozenset({Status.AGREE, Status.SUSPECT, Status.DRIFT, Status.DISAGREE, Status.ERROR})
BAD = frozenset({Status.DRIFT, Status.DISAGREE, Status.ERROR})


@dataclass(frozen=True, kw_only=True)
class Record:
    """One case put to one cell.

    program: "declared", "exact" or "envelope": what the answer was held to.
    excess: largest distance over allowed radius; above 1 it lies outside the declared arithmetic.
    exact, elements: how many compared elements equal the program's own rounding, of how many.
    why: one sentence for everything that is not plain agreement.
    where: index of the worst element in `output`.
    fault: the entry of the fault dictionary that explains the residual, if one does.
    lost: "case" where the worker died or hung over it, "worker" where there was none to ask.
    subject_ms, program_ms, other_ms: wall time by what it was spent on, in milliseconds.
    """

    op: str
    subject: str
    lane: str
    tier: str
    status: Status
    program: str = "declared"
    case: str = ""
    case_id: str = ""
    excess: float = 0.0
    exact: int = 0
    elements: int = 0
    output: str = ""
    where: tuple[int, ...] = ()
    why: str = ""
    fault: str = ""
    lost: str = ""
    subject_ms: float = 0.0
    program_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.op, self.subject, self.lane

    def to_json(self) -> str:
        """One line; fields at their default are left out, infinity is written as the string."""
        data = {"format": FORMAT}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                data[f.name] = _plain(value)
        return json.dumps(data, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """The record that `to_json` wrote.

        Raises:
            ValueError: not a record.
            Newer: one of a newer version.
        """
        try:
            data: dict[str, Any] = json.loads(line)
            version = data.pop("format")
            if version > FORMAT:
                raise Newer(
                    f"record format={version} is newer than {FORMAT}, the newest that this "
                    "version reads; update kernel-parity"
                )
            _check(data)
            data["status"] = Status(data["status"])
            data["excess"] = float(data.get("excess", 0.0))
            data["where"] = tuple(data.get("where", ()))
            return cls(**data)
        except Newer:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{line[:80]!r} is not a record: {error}") from error


_KINDS: dict[str, tuple[type, ...]] = {
    f.name: {str: (str,), int: (int,), float: (float, int)}[f.type]  # pyright: ignore
    for f in fields(Record)
    if f.type in (str, int, float)
} | {"status": (str,), "excess": (float, int, str), "where": (list,)}
_KNOWN: dict[str, tuple[str, ...]] = {
    "op": cases.OPS,
    "lane": lane.NAMES,
    "tier": tuple(lane.Tier),
    "program": ("declared", "exact", "envelope"),
    "lost": ("", "case", "worker"),
}


def _check(data: dict[str, Any]) -> None:
    """Refuse values that no record has; names are the dataclass's to check.

    Raises:
        ValueError: there is one.
    """
    for name, value in data.items():
        if type(value) not in _KINDS.get(name, (type(value),)):
            raise ValueError(f"{name}={value!r} has the wrong type")
        if name in _KNOWN and value not in _KNOWN[name]:
            raise ValueError(f"{name}={value!r}, expected one of {', '.join(_KNOWN[name])}")
    if not all(type(x) is int for x in data.get("where", ())):
        raise ValueError(f"where={data['where']!r}, expected integers")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return list(value) if isinstance(value, tuple) else value


def read(path: Path) -> Iterator[Record]:
    """The records of one JSON-lines file.

    Raises:
        ValueError: a line is no record; the message names the file and the line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            yield parse(line, path, number)


def parse(line: bytes, path: Path, number: int) -> Record:
    """The record of a file's line.

    Raises:
        ValueError, Newer: as `Record.from_json`; the message names the file and the line.
    """
    try:
        return Record.from_json(line.decode("utf-8"))
    except ValueError as error:
        kind = Newer if isinstance(error, Newer) else ValueError
        raise kind(f"{path}, line {number}: {error}") from error
