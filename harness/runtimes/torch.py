"""PyTorch: devices, tensors with their strides, and a trace of the operators that ran."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cases.layouts import memory
from harness.lane import Presence, Tier


def presence(lane: str) -> Presence:
    match lane:
        case "cpu":
            return Presence(tier=Tier.HARDWARE, device="cpu")
        case "amx":
            if torch.cpu._is_amx_tile_supported():
                return Presence(tier=Tier.HARDWARE, device="cpu")
            return Presence(tier=Tier.ABSENT, reason="this CPU has no AMX tiles (CPUID amx_tile)")
        case "mps":
            if torch.backends.mps.is_available():
                return Presence(tier=Tier.HARDWARE, device="mps")
            return Presence(tier=Tier.ABSENT, reason="torch.backends.mps is not available")
        case "cuda":
            if torch.cuda.is_available():
                return Presence(tier=Tier.HARDWARE, device="cuda")
            return Presence(tier=Tier.ABSENT, reason="torch.cuda is not available")
    return Presence(tier=Tier.ABSENT, reason=f"torch has no device for the lane {lane!r}")


class _Trace(TorchDispatchMode):
    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Notes calls of torch.ops: composite operators reach no dispatch mode."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverloadPacket):
            self._names.add(func._qualified_op_name)
        return func(*args, **(kwargs or {}))


@contextmanager
def on(device: str) -> Iterator[None]:
    del device  # the tensors say where they are
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def trace() -> Iterator[set[str]]:
    """Names of the dispatcher's operators, e.g. "aten::bmm"."""
    names: set[str] = set()
    with _Calls(names), _Trace(names):
        yield names


def send(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of the whole storage, so that strides and what lies in the gaps go along."""
    copied = x.untyped_storage().clone()
    copy = torch.empty(0, dtype=x.dtype).set_(copied, x.storage_offset(), x.size(), x.stride())
    return copy if device == "cpu" else _moved(copy, device)


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    return memory(x).to(device).as_strided(x.size(), x.stride(), x.storage_offset())


def refill(sent: torch.Tensor, x: torch.Tensor, device: str) -> torch.Tensor:
    before, values = memory(sent), memory(x)
    if before.shape != values.shape:  # the subject has resized it
        return send(x, device)
    return before.copy_(values).as_strided(x.size(), x.stride(), x.storage_offset())


def fetch(x: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(x).__name__}")
    # A lazily negated or conjugated view has no bits of its own yet.
    return x.detach().resolve_conj().resolve_neg().cpu()
