"""sglang: its MLX server, its torch attention, and its rotary embeddings.

It pins its own torch, so it lives in an environment of its own (`parity env create sglang`). A file
of this folder says what its subjects claim, and is read everywhere; `calls` holds the production
calls, and imports sglang.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from harness.subject import Tensors

REQUIRES = ("sglang", "mlx", "mlx_lm", "transformers")
LANES = ("cpu", "amx", "mps", "cuda")


@functools.cache
def load() -> None:
    """Import sglang, by importing all that calls it: half a minute."""
    calls = importlib.import_module(f"{__name__}.calls")
    for module in pkgutil.iter_modules(calls.__path__):
        importlib.import_module(f"{calls.__name__}.{module.name}")


def deferred(module: str, name: str, *args: Any, **more: Any) -> Callable[[Any, Tensors], Tensors]:
    """What `calls.<module>.<name>(*args, **more)` gives, made when it is first asked."""

    def run(case: Any, tensors: Tensors) -> Tensors:
        call = getattr(importlib.import_module(f"{__name__}.calls.{module}"), name)
        return (call(*args, **more) if args or more else call)(case, tensors)

    return run
