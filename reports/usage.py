"""What a user may type, checked by name before anything runs."""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cases
from harness import engines as _engines
from harness import gate, profiles, runtimes
from harness import lane as _lane
from harness.rundir import latest

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: conftest.py and tests lie beside this package."""
RUNS = ROOT / "reports" / "out" / "runs"


class UsageError(Exception):
    """A value that can't be used; the message names it, what was expected, and what to do."""


def ops(names: Sequence[str] | None) -> tuple[str, ...]:
    """The ops named, or all of them.

    Raises:
        UsageError: one is unknown.
    """
    return tuple(_known("op", names, cases.OPS, "`ls cases` shows them")) or cases.OPS


def engines(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The engines named, or None for all.

    Raises:
        UsageError: one is unknown.
    """
    return tuple(_known("engine", names, _engines.NAMES, "`ls harness/engines` shows them")) or None


def lanes(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The lanes named, or None for all.

    Raises:
        UsageError: one is unknown.
    """
    return tuple(_known("lane", names, _lane.NAMES, "`parity lanes` shows them")) or None


def profile(name: str) -> str:
    """The profile's name.

    Raises:
        UsageError: it is unknown.
    """
    return _known("profile", [name], tuple(profiles.PROFILES), "pass one of these")[0]


def required(texts: Sequence[str] | None) -> list[str]:
    """Values of --require-lane.

    Raises:
        UsageError: one names no lane or tier.
    """
    try:
        return [str(gate.requirement(text)) for text in texts or ()]
    except ValueError as error:
        raise UsageError(str(error)) from error


def writable(folder: Path) -> None:
    """Make the folder, if need be, and a file in it, so that a run does not end in an error.

    Raises:
        UsageError: it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--runs {folder} can't be written ({error.strerror or error}); expected a folder "
            "that takes run records: free it, or name another"
        ) from error


def folder(run: Path | None, runs: Path) -> Path:
    """The folder of a run by its path, its name or the end of its name; of the latest if None.

    Raises:
        UsageError: there is no such run.
        RunError: there is no run at all.
    """
    if run is None:
        return latest(runs)
    for found in (run, runs / run):
        with contextlib.suppress(OSError, ValueError):  # longer than a name can be
            if found.is_dir():
                return found
    ends = [path for path in runs.glob("*") if path.is_dir() and path.name.endswith(str(run))]
    if len(ends) == 1:
        return ends[0]
    raise UsageError(
        f"run={str(run)!r} is neither a folder nor the name of a run in {runs}; expected one of "
        f"those that `ls {runs}` shows"
    )


def runtime(name: str) -> str:
    """The runtime's name.

    Raises:
        UsageError: it is unknown.
    """
    return _known("runtime", [name], runtimes.NAMES, "it is whose tensors a function takes")[0]


def resolved(source: str) -> str:
    """FILE.py:NAME with the whole path, so that it can be found from another folder.

    Raises:
        UsageError: it is nothing that a path can be.
    """
    path, colon, name = source.rpartition(":")
    try:
        return f"{Path(path).resolve()}:{name}" if colon and path else source
    except (OSError, ValueError) as error:
        raise UsageError(f"{source!r} is no path ({error}); expected FILE.py:FUNCTION") from error


def said(option: str, value: str | None) -> str | None:
    """The value of an option that may be left out; an empty one would pass for that.

    Raises:
        UsageError: it is empty.
    """
    if value is not None and not value.strip():
        raise UsageError(f"{option} {value!r} is empty; name one, or leave it out for the default")
    return value


def positive(name: str, value: int | None) -> int | None:
    """The value of an option that counts something.

    Raises:
        UsageError: it is below 1.
    """
    if value is not None and value < 1:
        raise UsageError(f"--{name} {value} must be at least 1; leave it out for the default")
    return value


def _known(
    what: str, names: Sequence[str] | None, known: Sequence[str], remedy: str
) -> Sequence[str]:
    for name in names or ():
        if name not in known:
            raise UsageError(
                f"{what}={name!r} is unknown; expected one of {', '.join(known)}; {remedy}"
            )
    return names or ()
