"""This machine, in words that go into a run: versions, CPU, lane tiers, commit."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from harness import runtimes
from harness.environments import declared
from harness.environments.store import Store
from harness.lane import LANES, Presence

PACKAGES = ("torch", "transformers", "mlx", "mlx-lm", "hypothesis")


def describe(root: Path) -> dict[str, Any]:
    """JSON values that say on what a run was judged. root: the folder whose commit is named."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpu": cpu(),
        "lanes": {
            runtime: {
                lane: {"tier": p.tier.value, "device": p.device, "reason": p.reason}
                for lane, p in tiers.items()
            }
            for runtime, tiers in presences().items()
        },
        "environments": environments(),
        "git": commit(root),
    }


def versions() -> dict[str, str | None]:
    """Version by package, None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def environments() -> dict[str, dict[str, Any]]:
    """Host and versions of every engine's own environment that can be asked."""
    found = {one.name: Store().find(one) for one in declared.load().values()}
    return {
        name: {"host": ready.facts.host, "versions": ready.facts.versions}
        for name, ready in found.items()
        if ready is not None
    }


def cpu() -> dict[str, Any]:
    """Model, instruction set flags, and the capability that torch dispatches on."""
    facts: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    flags = facts.get("flags") or facts.get("Features") or ""
    return {
        "model": facts.get("model name") or platform.processor() or platform.machine(),
        "flags": sorted(flags.split()),
        "torch": torch.backends.cpu.get_cpu_capability(),
    }


def presences() -> dict[str, dict[str, Presence]]:
    """How each runtime finds each lane here: [runtime][lane]."""
    return {
        runtime: {lane.name: runtimes.presence(runtime, lane.name) for lane in LANES}
        for runtime in runtimes.NAMES
    }


def commit(root: Path) -> dict[str, Any]:
    """The commit that `root` is at and whether its files differ from it; empty outside git."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return {} if head is None or changes is None else {"commit": head, "dirty": bool(changes)}
