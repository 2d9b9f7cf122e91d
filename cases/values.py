"""Numbers for inputs: the same bytes on every machine, from a counter and exact arithmetic.

A stream is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
keyed by the case's seed and the tensor's name; no libm function is called, so nothing depends on
a library version or a CPU.
"""

import functools
import hashlib
import math

import numpy as np
import torch

NAMES = (
    "normal",
    "small",
    "loud",
    "peaked",
    "flat",
    "cancel",
    "alternating",
    "zeros",
    "subnormal",
    "constant",
    "outlier",
    "positive",
    "grid",
    "steady",
)
"""Fills, most ordinary first (Hypothesis shrinks towards it)."""

INDEPENDENT = frozenset({"normal", "small", "loud", "peaked", "flat", "outlier"})
"""Fills whose elements are independent draws, for which the probabilistic radius holds."""

_ROUND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def words(seed: int, name: str, count: int) -> np.ndarray:
    """`count` random uint32 words of the stream named `name` under `seed`."""
    key0, key1 = _key(seed, name)
    blocks = -(-count // 4)
    counter = np.arange(blocks, dtype=np.uint64)
    x = [counter & _LOW, counter >> _SHIFT, np.zeros_like(counter), np.zeros_like(counter)]
    with np.errstate(over="ignore"):
        for _ in range(10):
            p0, p1 = _ROUND[0] * x[0], _ROUND[1] * x[2]
            x = [
                (p1 >> _SHIFT) ^ x[1] ^ np.uint64(key0),
                p1 & _LOW,
                (p0 >> _SHIFT) ^ x[3] ^ np.uint64(key1),
                p0 & _LOW,
            ]
            key0, key1 = key0 + _WEYL[0], key1 + _WEYL[1]
    return np.stack(x, -1).reshape(-1)[:count].astype(np.uint32)


@functools.lru_cache(maxsize=256)
def _key(seed: int, name: str) -> tuple[np.uint32, np.uint32]:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.uint32(int.from_bytes(digest[:4], "little")), np.uint32(
        int.from_bytes(digest[4:8], "little")
    )


def normal(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bell-shaped float64 values: mean 0, variance 1.02, |x| < 3.5.

    Two words give four 16-bit uniforms, whose sum (Irwin-Hall of order 4) less its mean is an
    integer of 18 bits; times 7 * 2**-18 it is exact in float32.
    """
    count = math.prod(shape)
    halves = words(seed, name, 2 * count).view(np.uint16).reshape(count, 4)
    total = halves.sum(-1, dtype=np.int64) - 2 * 65535
    return torch.from_numpy(total * (7 * 2.0**-18)).reshape(shape)


def integers(seed: int, name: str, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    """int64 values in [low, high], almost uniform (the modulo bias is below 2**-32 * range)."""
    raw = words(seed, name, math.prod(shape)).astype(np.int64)
    return torch.from_numpy(low + (raw * (high - low + 1) >> 32)).reshape(shape)


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Float64 values as `dtype`, by way of float32: IEEE conversions, the same everywhere."""
    return x.to(torch.float32).to(getattr(torch, dtype))


def poison(dtype: str) -> float:
    """A large finite value for everything that must not be read: products overflow no float32."""
    return 2.0**14 if dtype == "float16" else 2.0**60


def tiny(dtype: str) -> float:
    """The smallest normal number of `dtype`; times a draw it lands among the subnormals."""
    return float(torch.finfo(getattr(torch, dtype)).smallest_normal)
