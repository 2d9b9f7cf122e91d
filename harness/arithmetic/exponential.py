"""Declared exponential functions: their error, their flush point, and torch's fast one replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import FP32, round_to


@dataclass(frozen=True, kw_only=True)
class Exp:
    """A kernel's exp(x) for x <= 0.

    Relative error at most (e0 + e1 |x|) in unit roundoffs of the accumulator (2^-24 for
    float32); a result with x below `flush` may be 0. `replica`, if given, is the kernel's own
    approximation, evaluated in place of exp where a whole vector of `width` elements is full
    (the scalar tail calls the library); e0 and e1 then bound the distance to the replica.
    """

    e0: float = 2.0
    e1: float = 0.0
    flush: float = -87.0
    replica: Callable[[Tensor], Tensor] | None = None
    width: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        """exp along the last dimension, [..., n] float64; -inf gives 0."""
        if self.replica is None:
            return torch.exp(x)
        vectors = x.shape[-1] // self.width * self.width
        if vectors == x.shape[-1]:
            return self.replica(x)
        return torch.cat([self.replica(x[..., :vectors]), torch.exp(x[..., vectors:])], -1)


_LOG2E = 1.4426950408889634
# Cubic coefficients of 2^f - 1 - f on [0, 1), Malossi et al. (2015), as torch spells them.
_CUBIC = (-0.079204240219773236, -0.22433836478672356, 0.30354260500649682, 0.00010703434948458272)
_LOWEST = -87.33654


def cubic_exp(x: Tensor) -> Tensor:
    """The cubic bit-trick exponential of torch's CPU flash kernel (fexp_u20), replayed.

    2^y = 2^floor(y) * 2^f; with a cubic c(f) ~ 1 + f - 2^f, the float32 whose *bits* are the
    integer 2^23 (y - c(f) + 127) is close to 2^y (Schraudolph 1999; Malossi et al. 2015). That
    integer is formed in float32, where it has a spacing of 64 or 128; the rounding is replayed.
    What is not replayed, the float32 roundings on the way to it, can move it by one spacing:
    64 / 2^23 relative, plus about 3 u |y|.
    """
    y = x.clamp_min(-88.0).mul(_LOG2E)
    fraction = y - y.floor()
    cubic = fraction * _CUBIC[0]
    for coefficient in _CUBIC[1:3]:
        cubic = cubic.add_(coefficient).mul_(fraction)
    bits = y.sub_(cubic).sub_(_CUBIC[3]).add_(127.0).mul_(2.0**23)
    bits = round_to(bits, FP32).clamp_min_(0.0)
    value = bits.to(torch.int32).view(torch.float32).to(torch.float64)
    return value.masked_fill_(x < _LOWEST, 0.0)
