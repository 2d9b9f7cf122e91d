"""The environments that pyproject.toml declares: what each is made of, and whom it serves."""

import functools
import hashlib
import platform
import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.environments.source import ROOT


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One table of `[tool.parity.environments]`.

    engines: folders of harness/engines whose packages it holds.
    steps: words of one `pip install` each; files are named from the checkout's root.
    """

    name: str
    engines: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]

    @property
    def key(self) -> str:
        """Twelve hex digits of all that decides what a build holds: steps, files, Python, host."""
        total = hashlib.sha256()
        told = f"{sys.version_info[:2]} {sys.platform} {platform.machine()}"
        for word in (told, *(word for step in self.steps for word in step)):
            total.update(word.encode() + b"\0")
            if (ROOT / word).is_file():
                total.update((ROOT / word).read_bytes())
        return total.hexdigest()[:12]

    @property
    def remedy(self) -> str:
        """The command that builds it."""
        return f"parity env create {self.name}"


def load(path: Path = ROOT / "pyproject.toml") -> dict[str, Declared]:
    """Every environment by name; none where there is no such file.

    Raises:
        ValueError: a table lacks a field, has an unknown one, or names an engine twice.
    """
    return _load(path)


@functools.cache
def _load(path: Path) -> dict[str, Declared]:
    if not path.is_file():
        return {}
    tool: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    tables = tool.get("parity", {}).get("environments", {})
    found = {name: _declared(path, name, table) for name, table in tables.items()}
    engines = [engine for one in found.values() for engine in one.engines]
    if twice := {engine for engine in engines if engines.count(engine) > 1}:
        raise ValueError(f"{path}: {', '.join(sorted(twice))} is in two environments; name it once")
    return found


def _declared(path: Path, name: str, table: Mapping[str, Any]) -> Declared:
    where = f"{path}, [tool.parity.environments.{name}]"
    if set(table) != {"engines", "steps"}:
        raise ValueError(
            f"{where} has {', '.join(table) or 'no field'}; expected engines and steps"
        )
    return Declared(
        name=name,
        engines=tuple(table["engines"]),
        steps=tuple(tuple(shlex.split(step)) for step in table["steps"]),
    )


def serving(engine: str) -> Declared | None:
    """The environment that holds the engine, if one does."""
    return next((one for one in load().values() if engine in one.engines), None)
