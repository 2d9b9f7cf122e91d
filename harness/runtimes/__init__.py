"""Tensor libraries: how to reach a lane's device and move tensors there and back. One file each."""

import importlib
import importlib.util
import pkgutil
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from torch import Tensor

from harness.lane import Presence, Tier

NAMES = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


class Runtime(Protocol):
    """What `runtimes/<runtime>.py` provides."""

    def presence(self, lane: str) -> Presence:
        """How this runtime finds `lane` on this machine."""
        ...

    def on(self, device: str) -> AbstractContextManager[None]:
        """Run on `device` at full precision."""
        ...

    def trace(self) -> AbstractContextManager[set[str]]:
        """The set fills with the names of the kernels that run inside: the path proof."""
        ...

    def send(self, x: Tensor, device: str) -> Any:
        """A CPU tensor as a fresh tensor of this runtime: equal values, dtype and strides."""
        ...

    def refill(self, sent: Any, x: Tensor, device: str) -> Any:
        """As `send`, in the memory of a tensor that was sent before, where that can be written."""
        ...

    def fetch(self, x: Any) -> Tensor:
        """A tensor of this runtime on the CPU, same dtype. Waits for the device.

        Raises:
            TypeError: not a tensor of this runtime.
        """
        ...


def load(runtime: str) -> Runtime:
    """The runtime's module.

    Raises:
        ValueError: no such runtime.
    """
    if runtime not in NAMES:
        raise ValueError(f"runtime={runtime!r} is unknown; expected one of {', '.join(NAMES)}")
    return cast(Runtime, importlib.import_module(f"harness.runtimes.{runtime}"))


def presence(runtime: str, lane: str) -> Presence:
    """How `lane` is present for `runtime`, absent when its package is not installed."""
    if runtime in NAMES and importlib.util.find_spec(runtime) is None:
        return Presence(tier=Tier.ABSENT, reason=f"the package {runtime} is not installed")
    return load(runtime).presence(lane)
