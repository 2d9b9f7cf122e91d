"""Accepted divergences: which cases a subject is known to answer otherwise, and why."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import cases
from cases.case import Case

_FIELDS = {"id", "op", "subjects", "spares", "when", "case", "why"}
_OPTIONAL = {"without", "device", "cpu", "link"}
SPARES = ("case", "dead")


@dataclass(frozen=True, kw_only=True)
class Known:
    """One entry of `reports/known.toml`.

    subjects: name patterns (fnmatch). when: what a case must be (Case.matches).
    without: features that it must not use.
    device: the runtime's device that it is known of, e.g. "cpu" for MLX away from Metal; "": all.
    cpu: the instruction set on which it was seen, as torch names it ("AVX2"): for undefined
        behaviour, which need not show elsewhere; such cases are spared there as well. "": all.
    spares: "case": such a case is not judged; "dead": only its rows that see nothing are left out.
    pinned: one case that diverges; a test demands that it still does.
    """

    id: str
    op: str
    subjects: tuple[str, ...]
    when: Mapping[str, Any]
    spares: str
    pinned: Case
    why: str
    without: frozenset[str] = frozenset()
    device: str = ""
    cpu: str = ""
    link: str = ""

    def concerns(self, op: str, subject: str, device: str | None) -> bool:
        """Whether it is about this subject on this device of its runtime."""
        return (
            op == self.op
            and any(fnmatchcase(subject, pattern) for pattern in self.subjects)
            and self.device in ("", device)
        )

    def covers(self, subject: str, device: str | None, case: Case) -> bool:
        """Whether it covers this case for this subject on this device of its runtime."""
        return self.concerns(case.op, subject, device) and self.matches(case)

    def matches(self, case: Case) -> bool:
        """Whether it is such a case, whoever is asked."""
        return case.matches(self.when) and not self.without & case.features()


def load(path: Path) -> tuple[Known, ...]:
    """The entries of a known.toml.

    Raises:
        ValueError: the file is no TOML, or an entry lacks a field, has an unknown one, or pins a
            case that its own `when` does not cover.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("known", [])
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    found = tuple(_entry(path, entry) for entry in entries)
    ids = [known.id for known in found]
    if len(set(ids)) != len(ids):
        raise ValueError(f"{path}: ids must be unique, got {', '.join(ids)}")
    return found


def _entry(path: Path, entry: Mapping[str, Any]) -> Known:
    where = f"{path}, entry {entry.get('id', '?')!r}"
    if unknown := set(entry) - _FIELDS - _OPTIONAL:
        names = sorted(_FIELDS | _OPTIONAL)
        raise ValueError(f"{where}: unknown fields {sorted(unknown)}; known: {names}")
    if missing := _FIELDS - set(entry):
        raise ValueError(f"{where}: {sorted(missing)} is missing")
    if entry["spares"] not in SPARES:
        raise ValueError(f"{where}: spares={entry['spares']!r}, expected one of {SPARES}")
    module = cases.load(entry["op"])
    if unknown := set(entry.get("without", ())) - set(module.FEATURES):
        names = ", ".join(module.FEATURES)
        raise ValueError(f"{where}: without={sorted(unknown)}, expected features: {names}")
    pinned = module.CASE.from_json(entry["case"])
    known = Known(
        id=entry["id"],
        op=entry["op"],
        subjects=tuple(entry["subjects"]),
        when=entry["when"],
        spares=entry["spares"],
        pinned=pinned,
        why=entry["why"],
        without=frozenset(entry.get("without", ())),
        device=entry.get("device", ""),
        cpu=entry.get("cpu", ""),
        link=entry.get("link", ""),
    )
    if not known.matches(pinned):
        raise ValueError(f"{where}: its pinned case is not covered by its own `when` and `without`")
    return known
