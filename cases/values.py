"""Numbers for inputs: the same bytes on every machine, from a counter and exact arithmetic.

A stream is SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014) started at a hash of the case's seed and the tensor's name; no libm function is
called, so nothing depends on a library version or a CPU.
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

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_EVEN_HALVES = np.uint64(0x0000FFFF0000FFFF)
_BOTH_HALVES = np.uint64(2**32 + 1)
_BLOCK = 1 << 13
"""Words made at a time: they stay in the cache, which makes millions of them six times faster."""
_STEPS = np.arange(1, _BLOCK + 1, dtype=np.uint64) * _GOLDEN


def words(seed: int, name: str, count: int) -> np.ndarray:
    """`count` random uint64 words of the stream named `name` under `seed`."""
    return splitmix(_key(seed, name), count)


def splitmix(key: int, count: int, start: int = 0) -> np.ndarray:
    """Outputs start to start + count of SplitMix64 from `key`; word i needs no other word."""
    z = _STEPS[:count] if count <= _BLOCK else np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    z = z + np.uint64((key + start * int(_GOLDEN)) % 2**64)
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        z ^= z >> np.uint64(shift)
        z *= factor
    z ^= z >> np.uint64(31)
    return z


@functools.lru_cache(maxsize=256)
def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def normal(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bell-shaped float64 values: mean 0, variance 1.02, |x| < 3.5.

    One word gives four 16-bit uniforms, whose sum (Irwin-Hall of order 4) less its mean is an
    integer of 18 bits; times 7 * 2**-18 it is exact in float32.
    """
    key, out = _key(seed, name), np.empty(math.prod(shape))
    for start in range(0, out.size, _BLOCK):
        raw = splitmix(key, min(_BLOCK, out.size - start), start)
        odd = raw >> np.uint64(16)
        odd &= _EVEN_HALVES
        raw &= _EVEN_HALVES
        raw += odd
        raw *= _BOTH_HALVES  # their sum, in the upper one
        raw >>= np.uint64(32)
        block = out[start : start + _BLOCK]
        block[:] = raw.view(np.int64)  # signed ones convert faster
        block -= 2 * 65535
        block *= 7 * 2.0**-18
    return torch.from_numpy(out.reshape(shape))


def integers(seed: int, name: str, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    """int64 values in [low, high], almost uniform (the bias is below 2**-32 * range)."""
    raw = (words(seed, name, math.prod(shape)) >> np.uint64(32)).astype(np.int64)
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
