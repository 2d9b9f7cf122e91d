"""Cases that once were findings, one JSON file each: `<folder>/<op>/<case id>.json`.

They are asked first in every later run, of every subject that claims them: what has gone wrong
goes wrong again. An entry stays when its finding is mended.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import cases
from cases.case import Case
from harness.files import write_whole
from harness.record import Record

FOLDER = Path(cases.__file__).resolve().parent / "corpus"
"""The repository's own."""
FORMAT = 1
"""The version of the fields; a reader refuses a newer one."""


class CorpusError(Exception):
    """An entry can't be found, read or written; the message says which, why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The smallest case of one finding, and what is known of it.

    subject, lane, status, fault, why: of the record that found it (harness.record).
    source: "FILE.py:FUNCTION" where it is a person's own function; `options` are those with which
        it was checked (runtime, program, features).
    found: UTC date. versions: of what ran, by package.
    """

    case: Case
    subject: str
    lane: str
    status: str
    why: str
    found: str
    fault: str = ""
    source: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def op(self) -> str:
        return self.case.op

    @classmethod
    def of(
        cls,
        record: Record,
        versions: Mapping[str, str | None],
        *,
        source: str = "",
        options: Mapping[str, str] | None = None,
    ) -> Self:
        """The entry of a finding made today.

        Raises:
            ValueError: the record has no case that fits its op.
        """
        return cls(
            case=cases.load(record.op).CASE.from_json(record.case),
            subject=record.subject,
            lane=record.lane,
            status=record.status.value,
            why=record.why,
            fault=record.fault,
            found=f"{datetime.now(UTC):%Y-%m-%d}",
            source=source,
            options=options or {},
            versions=versions,
        )

    def to_json(self) -> str:
        """An object with one field a line; `from_json` turns it into an equal entry."""
        data = {"format": FORMAT, "op": self.op, **asdict(self)}
        data["case"] = json.loads(self.case.to_json())
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The entry that `to_json` wrote.

        Raises:
            ValueError: not an entry, one of a newer version, or one whose case fits no op any more.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("format")
            if version > FORMAT:
                raise ValueError(f"format={version} is newer than {FORMAT}; update kernel-parity")
            kind = cases.load(data.pop("op")).CASE
            data["case"] = kind.from_json(json.dumps(data["case"]))
            return cls(**data)
        except (
            KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError
        ) as error:  # fmt: skip
            raise ValueError(f"not an entry of a corpus ({error!r})") from error


def read(folder: Path, op: str) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The op's entries by case id, and a sentence for each file that is none any more."""
    entries, notes = [], []
    for path in sorted((folder / op).glob("*.json")):
        try:
            entry = Entry.from_json(path.read_text(encoding="utf-8"))
            if (entry.op, entry.case.id) != (op, path.stem):
                raise ValueError(f"its case is {entry.op} {entry.case.id}")
        except (OSError, ValueError) as error:
            notes.append(f"{path} is not asked: {error}; mend the file, or remove it")
        else:
            entries.append(entry)
    return tuple(entries), tuple(notes)


def save(folder: Path, entry: Entry) -> Path:
    """Keep the entry, unless this very finding is kept already; the newest of a case stays.

    Several processes may save at once: a reader sees a whole file, old or new.

    Raises:
        CorpusError: the folder can't be written.
    """
    path = folder / entry.op / f"{entry.case.id}.json"
    if _same(path, entry):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, entry.to_json())
    except OSError as error:
        raise CorpusError(
            f"{folder} can't be written ({error.strerror or error}); expected a folder that "
            "takes findings: free it, or name another with --corpus"
        ) from error
    return path


def find(folder: Path, prefix: str) -> Entry | None:
    """The entry whose case id begins with `prefix`, or None.

    Raises:
        CorpusError: several do, or the file that does is no entry any more.
    """
    paths = sorted(folder.glob(f"*/{prefix}*.json")) if prefix.isalnum() else []
    if len(paths) > 1:
        raise CorpusError(
            f"case={prefix!r} is the beginning of {', '.join(p.stem for p in paths)}; "
            "give more digits"
        )
    if not paths:
        return None
    try:
        return Entry.from_json(paths[0].read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(f"{paths[0]}: {error}; mend the file, or remove it") from error


def _same(path: Path, entry: Entry) -> bool:
    """Whether the file holds this finding: the same subject, found wrong in the same way."""
    try:
        kept = Entry.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (kept.subject, kept.lane, kept.source, kept.options, kept.fault) == (
        entry.subject, entry.lane, entry.source, dict(entry.options), entry.fault
    )  # fmt: skip
