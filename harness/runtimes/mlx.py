"""MLX: Metal where there is some; elsewhere its CPU backend runs the same graph, emulated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import torch

from cases.layouts import memory
from harness.lane import Presence, Tier

_TORCH = {
    mx.float32: torch.float32,
    mx.float16: torch.float16,
    mx.bfloat16: torch.bfloat16,
    mx.bool_: torch.bool,
    mx.int32: torch.int32,
    mx.int64: torch.int64,
    mx.uint32: torch.uint32,
    mx.int8: torch.int8,
    mx.uint8: torch.uint8,
}
_MLX = {ours: theirs for theirs, ours in _TORCH.items()}


def presence(lane: str) -> Presence:
    if lane != "mps":
        return Presence(tier=Tier.ABSENT, reason=f"MLX serves the mps lane, not {lane}")
    if mx.metal.is_available():
        return Presence(tier=Tier.HARDWARE, device="gpu")
    return Presence(tier=Tier.EMULATED, device="cpu", reason="no Metal: MLX's CPU backend")


@contextmanager
def on(device: str) -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.Device(getattr(mx, device)))
    try:
        yield
    finally:
        mx.set_default_device(before)


@contextmanager
def trace() -> Iterator[set[str]]:
    """MLX names no kernels: the device that its default stream went to, "mlx:cpu" or "mlx:gpu"."""
    names: set[str] = set()
    yield names
    stream = mx.default_stream(mx.default_device())
    names.add(f"mlx:{'gpu' if stream.device.type == mx.gpu else 'cpu'}")


def send(x: torch.Tensor, device: str) -> mx.array:
    del device  # unified memory
    if x.dtype not in _MLX:
        raise TypeError(f"dtype={x.dtype} has no MLX counterpart here")
    if x.is_contiguous() and x.storage_offset() == 0:
        return _array(x)
    return mx.as_strided(_array(memory(x)), tuple(x.shape), x.stride(), int(x.storage_offset()))


def refill(sent: mx.array, x: torch.Tensor, device: str) -> mx.array:
    del sent  # an array is never written
    return send(x, device)


def _array(x: torch.Tensor) -> mx.array:
    if x.dtype == torch.bfloat16:  # NumPy has no bfloat16: hand over the bits
        return mx.array(x.contiguous().view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(x.numpy())


def fetch(x: Any) -> torch.Tensor:
    if not isinstance(x, mx.array):
        raise TypeError(f"expected an mlx array, got {type(x).__name__}")
    if x.dtype not in _TORCH:
        raise TypeError(f"dtype={x.dtype} has no torch counterpart here")
    if x.dtype == mx.bfloat16:  # NumPy has none
        return torch.from_numpy(_shared(x.view(mx.int16))).view(torch.bfloat16)
    return torch.from_numpy(_shared(x)).to(_TORCH[x.dtype])


def _shared(x: mx.array) -> np.ndarray:
    """The array's own memory, which MLX never writes again; a copy where it runs backwards."""
    view = np.asarray(x)
    return view.copy() if min(view.strides, default=0) < 0 else view
