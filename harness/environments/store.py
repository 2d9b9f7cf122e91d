"""Where environments are on this machine: built in the user's cache, or named by the user.

    <cache>/kernel-parity/environments/
        vllm-3f9a1c2b4d5e/      a Python environment; the tail of its name is `Declared.key`
            parity.json         its facts, written last: without them it is a half-built one
        vllm.lock, vllm.log     who builds, and all that pip said
    <config>/kernel-parity/environments/
        vllm.json               facts of what --python or --command named

A file of facts is {"format", "command", "facts"}: facts is what the worker said of itself.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from harness.environments.client import NoWorker, Worker
from harness.environments.declared import Declared
from harness.environments.source import ROOT
from harness.lane import Presence, Tier

FORMAT = 1
"""The version of the files of facts; others are as good as missing."""
MARKER = "parity.json"
Say = Callable[[str], None]
"""Takes a sentence about what is being done."""


class BuildError(Exception):
    """An environment can't be made; the message says which, why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an environment's worker said of itself when it was made.

    versions: by distribution. lanes: how each runtime finds each lane there. host: its name.
    """

    versions: dict[str, str]
    lanes: dict[str, dict[str, Presence]]
    host: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """An environment that can be asked. built: in the cache, not named by the user."""

    command: tuple[str, ...]
    facts: Facts
    built: bool


@dataclass(frozen=True, kw_only=True)
class Store:
    """The folders; tests have their own."""

    cache: Path = field(
        default_factory=lambda: platformdirs.user_cache_path("kernel-parity") / "environments"
    )
    config: Path = field(
        default_factory=lambda: platformdirs.user_config_path("kernel-parity") / "environments"
    )

    def find(self, declared: Declared) -> Ready | None:
        """The environment as it can be asked now: the interpreter that was named, else the build
        of just this lock."""
        return _read(self._named(declared), built=False) or _read(
            self.folder(declared) / MARKER, built=True
        )

    def folder(self, declared: Declared) -> Path:
        """Where the build of this very lock belongs."""
        return self.cache / f"{declared.name}-{declared.key}"

    def build(self, declared: Declared, options: Sequence[str], say: Say) -> Ready:
        """Make the environment, unless it is there; builds of older locks are removed.

        options: more words for every `pip install`.

        Raises:
            BuildError: pip failed, or what it installed can't be asked.
        """
        folder = self.folder(declared)
        with self._locked(declared, say):
            if ready := _read(folder / MARKER, built=True):
                self._named(declared).unlink(missing_ok=True)
                return ready
            for old in self._builds(declared):
                shutil.rmtree(old)
            python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
            log = self.cache / f"{declared.name}.log"
            with log.open("wb") as output:

                def step(*words: str) -> None:
                    say(" ".join(Path(word).name if "/" in word else word for word in words))
                    done = subprocess.run(
                        words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
                    )
                    if done.returncode:
                        raise BuildError(
                            f"the environment {declared.name} can't be built: {' '.join(words)} "
                            f"ended with exit code {done.returncode}: {_last_line(log)}; "
                            f"all it said is in {log}"
                        )

                step(sys.executable, "-m", "venv", str(folder))
                for words in declared.steps:
                    step(str(python), "-m", "pip", "install", *options, *words)
            ready = self._asked(declared, (str(python),), folder / MARKER, built=True)
            self._named(declared).unlink(missing_ok=True)
            return ready

    def name(self, declared: Declared, command: Sequence[str]) -> Ready:
        """Use the Python that `command` starts from now on, if it can be asked.

        Raises:
            BuildError: it can't.
        """
        return self._asked(declared, tuple(command), self._named(declared), built=False)

    def remove(self, declared: Declared, say: Say) -> list[Path]:
        """Remove every build and the interpreter that was named.

        Returns:
            What was removed.
        """
        gone = []
        with self._locked(declared, say):
            for folder in self._builds(declared):
                shutil.rmtree(folder)
                gone.append(folder)
            if (named := self._named(declared)).is_file():
                named.unlink()
                gone.append(named)
        return gone

    def _builds(self, declared: Declared) -> list[Path]:
        return [path for path in self.cache.glob(f"{declared.name}-*") if path.is_dir()]

    def _named(self, declared: Declared) -> Path:
        return self.config / f"{declared.name}.json"

    def _asked(
        self, declared: Declared, command: tuple[str, ...], path: Path, built: bool
    ) -> Ready:
        """Have the worker describe itself, and keep what it says in `path`, whole or not at all."""
        worker = Worker(declared.name, command)
        try:
            facts = worker.describe(declared.engines)
        except NoWorker as error:
            raise BuildError(str(error)) from error
        finally:
            worker.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".new")
        kept = {"format": FORMAT, "command": command, "facts": facts}
        half.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        half.replace(path)
        ready = _read(path, built=built)
        assert ready is not None
        return ready

    @contextmanager
    def _locked(self, declared: Declared, say: Say) -> Iterator[None]:
        """Alone on this machine with the environment; waits for whoever is."""
        self.cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.cache / f"{declared.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"another process is at work on {declared.name}; waiting for it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _read(path: Path, *, built: bool) -> Ready | None:
    """What a file of facts holds; None where there is none, or one of another version."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT:
            return None
        facts = kept["facts"]
        lanes = {
            runtime: {lane: Presence(**{**p, "tier": Tier(p["tier"])}) for lane, p in found.items()}
            for runtime, found in facts["lanes"].items()
        }
        return Ready(
            command=tuple(kept["command"]),
            facts=Facts(versions=facts["versions"], lanes=lanes, host=facts["host"]),
            built=built,
        )
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
