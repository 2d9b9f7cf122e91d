"""One run, one directory: everything that was judged and on what, written so that nothing is lost.

    <root>/20261130T061530Z-3f9a1c/          a finished run, never edited
        run.json                             what ran, where, how long
        records.jsonl                        one Record a line
        certificates.json                    added when they are first asked for
    <root>/20261130T061530Z-3f9a1c.partial/  a run that goes on, or that was killed
        run.json, records-<worker>.jsonl     what is known so far, one file per process

A line counts when it ends in a newline. Records go to the kernel line by line, so a killed process
loses at most the line that it was writing.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.files import write_whole
from harness.record import Newer, Record, parse, read

FORMAT = 1
"""The version of run.json's fields; a reader refuses a newer one."""

PARTIAL = ".partial"
_INFO = "run.json"
_RECORDS = "records.jsonl"


class RunError(Exception):
    """A run folder can't be written or read; the message says which, why, and what to do."""


class RunWriter:
    """One process's hand on a run that goes on.

    folder: the `.partial` directory. Several processes write into one, each under its own name.
    """

    def __init__(self, folder: Path, worker: str) -> None:
        self.folder = folder
        self._notes: list[str] | None = None
        self._count = 0
        try:
            path = folder / f"records-{worker}.jsonl"
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise _unwritable(folder, error) from error

    @property
    def name(self) -> str:
        """The run's name: UTC time of its start, and six hex digits."""
        return self.folder.name.removesuffix(PARTIAL)

    def append(self, record: Record) -> None:
        """Keep `record`, even if the process is killed the moment after.

        Raises:
            RunError: the disk does not take it.
        """
        try:
            self._file.write(record.to_json() + "\n")
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def flush(self) -> None:
        """Wait until the disk has everything: survives a power cut, not only a kill."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """What a worker does at its end; the run stays open."""
        self.flush()
        self._file.close()

    def join(self) -> list[str]:
        """Put the lines of all processes into one file; call it when the others have ended.

        Returns:
            A sentence for every half-written line that was left out.
        """
        self.close()
        if self._notes is not None:
            return self._notes
        notes: list[str] = []
        parts = sorted(self.folder.glob("records-*.jsonl"))
        joined = self.folder / (_RECORDS + ".new")
        with joined.open("wb") as out:
            for part in parts:
                whole, note = _whole_lines(part)
                out.write(whole)
                self._count += whole.count(b"\n")
                notes += note
            out.flush()
            os.fsync(out.fileno())
        # From here on readers take this file and none of the parts: no line counts twice.
        joined.replace(self.folder / _RECORDS)
        for part in parts:
            part.unlink()
        self._notes = notes
        return notes

    def finish(self, info: Mapping[str, Any]) -> Path:
        """Join, write run.json with `info` added to what is there, give the folder its name.

        Returns:
            The finished run's directory.
        """
        try:
            notes = self.join()
            known = read_info(self.folder)
            told = {"notes": [*known.get("notes", []), *notes], "records": self._count}
            _write_info(self.folder, {**known, **info, **told})
            done = self.folder.with_name(self.name)
            self.folder.rename(done)
            _sync(done.parent)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return done


def open_run(
    root: Path, info: Mapping[str, Any] | None = None, *, worker: str = "main"
) -> RunWriter:
    """Begin a run under `root`, in a folder that no other run has.

    info: what is known at the start, JSON values by name; kept even if the run is killed.

    Raises:
        RunError: `root` can't be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            now = datetime.now(UTC)
            name = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
            folder = root / (name + PARTIAL)
            if (root / name).exists():
                continue
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
        _write_info(
            folder, {"run": name, "start": now.isoformat(timespec="seconds"), **(info or {})}
        )
    except OSError as error:
        raise _unwritable(root, error) from error
    return RunWriter(folder, worker)


def attach(folder: Path, worker: str) -> RunWriter:
    """Another process's hand on the run that `open_run` began; `worker` is its own name."""
    return RunWriter(folder, worker)


def discard(folder: Path) -> None:
    """Remove a run that has nothing in it.

    Raises:
        RunError: it has records.
    """
    if (folder / _RECORDS).stat().st_size:
        raise RunError(f"{folder} has records and stays; only an empty run is removed")
    for name in (_RECORDS, _INFO):
        (folder / name).unlink()
    folder.rmdir()


def read_run(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """run.json and the records of a run, finished or not.

    `info["complete"]` says whether it was finished; `info["notes"]` holds a sentence for each
    half-written last line, and for each line of an unfinished run that can't be read: they are not
    among the records.

    Raises:
        RunError: no run there, or one that is corrupt or newer than this version.
    """
    if not (folder / _INFO).is_file():
        raise RunError(
            f"{folder} is no run: it has no {_INFO}; expected a folder that `parity run` wrote, "
            f"such as reports/out/runs/20261130T061530Z-3f9a1c"
        )
    info = read_info(folder)
    info["complete"] = not folder.name.endswith(PARTIAL)
    info.setdefault("notes", [])
    if info["complete"] and not (folder / _RECORDS).is_file():
        raise RunError(f"{folder} has no {_RECORDS}: the run is damaged; run it again")
    joined = folder / _RECORDS
    parts = [joined] if joined.is_file() else sorted(folder.glob("records-*.jsonl"))
    records: list[Record] = []
    for part in parts:
        try:
            records += read(part) if info["complete"] else _read_lines(part, info["notes"])
        except Newer as error:
            raise RunError(str(error)) from error
        except ValueError as error:
            raise RunError(f"{error}; the run is damaged, run it again") from error
        except OSError as error:
            raise _unreadable(part, error) from error
    if info["complete"] and info.get("records", len(records)) != len(records):
        raise RunError(
            f"{joined} has {len(records)} records and {_INFO} says {info['records']}: the run is "
            "damaged, run it again"
        )
    return info, records


def finished(root: Path) -> list[Path]:
    """The finished runs in `root`, in no order."""
    return [p.parent for p in root.glob(f"*/{_INFO}") if not p.parent.name.endswith(PARTIAL)]


def latest(root: Path) -> Path:
    """The finished run that began last.

    Raises:
        RunError: there is none.
    """
    if found := finished(root):  # names count seconds; of two in the same one, the later to finish
        return max(found, key=lambda run: (run.name.split("-")[0], run.stat().st_mtime_ns))
    unfinished = sorted(root.glob(f"*{PARTIAL}"))
    hint = f"; an unfinished one is {unfinished[-1]}" if unfinished else ""
    raise RunError(f"no finished run in {root}{hint}; start one with `parity run`")


def _read_lines(part: Path, notes: list[str]) -> list[Record]:
    """The records of an unfinished run's part; a note for each line that is none.

    Raises:
        Newer: one is of a newer version.
    """
    whole, torn = _whole_lines(part)
    notes += torn
    out = []
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            out.append(parse(line, part, number))
        except Newer:
            raise
        except ValueError as error:
            notes.append(f"{error}; the line is left out")
    return out


def _whole_lines(part: Path) -> tuple[bytes, list[str]]:
    """The part's bytes up to its last newline, and a sentence if there are more."""
    data = part.read_bytes()
    end = data.rfind(b"\n") + 1
    if end == len(data):
        return data, []
    return data[:end], [
        f"{part.name}: its last line is half-written ({len(data) - end} bytes) and is left out"
    ]


def read_info(folder: Path) -> dict[str, Any]:
    """run.json alone.

    Raises:
        RunError: it can't be read, or is newer than this version.
    """
    path = folder / _INFO
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        version = info.pop("format")
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is not a run's description: {error!r}; run it again") from error
    if not isinstance(version, int) or version > FORMAT:
        raise RunError(
            f"{path} has format={version!r}, expected at most {FORMAT}; update kernel-parity"
        )
    if not isinstance(notes := info.get("notes", []), list) or not all(
        isinstance(note, str) for note in notes
    ):
        raise RunError(f"{path} has notes={notes!r}, expected sentences; run it again")
    return info


def _write_info(folder: Path, info: Mapping[str, Any]) -> None:
    text = json.dumps({"format": FORMAT, **info}, indent=2, allow_nan=False)
    write_whole(folder / _INFO, text + "\n")


def _sync(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(where: Path, error: OSError) -> RunError:
    return RunError(
        f"{where} can't be written ({error.strerror or error}); expected a folder for run records: "
        "free it, or name another with --runs"
    )


def _unreadable(where: Path, error: OSError) -> RunError:
    return RunError(
        f"{where} can't be read ({error.strerror or error}); expected a file that `parity run` "
        "wrote: mend its rights, or run it again"
    )
