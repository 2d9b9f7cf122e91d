"""Tensors of intervals [mid - rad, mid + rad] and their elementwise arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .formats import FP64, Format, round_scalar, round_to

EPS64 = 2.0**-53
"""Unit roundoff of the float64 in which midpoints are computed."""

_SPLITTER = 2.0**27 + 1


def _product_error(a: Tensor, b: Tensor | float, product: Tensor) -> Tensor:
    """|a * b - product| exactly, by Veltkamp's splitting and Dekker's product (1971).

    Zero whenever the float64 product was exact, e.g. for two bfloat16 factors. Factors beyond
    2^900 would overflow the splitting; the bound u * |product| stands in for them.
    """

    def split(x: Any) -> tuple[Any, Any]:
        high = x * _SPLITTER
        high = high - (high - x)
        return high, x - high

    a_high, a_low = split(a)
    b_high, b_low = split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return torch.where(error.isfinite(), error.abs(), EPS64 * product.abs())


def _fits_float32(x: Tensor) -> bool:
    """Every value is a float32, so that float64 holds the product of any two."""
    return torch.equal(x.to(torch.float32).to(torch.float64), x)


def _sum_error(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """|a + b - total| exactly (Knuth's TwoSum)."""
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    return torch.where(error.isfinite(), error.abs(), torch.zeros_like(error))


class MidRad:
    """What a subject holds at one point of its program: some value in [mid - rad, mid + rad].

    `mid` and `rad` are float64 tensors of one shape. Every operation encloses: float64's own
    rounding goes into the radius, and a result that float64 holds exactly keeps radius 0, so
    that known rounding points can be replayed to the bit, ties included.

    `mid` may be +-inf only with radius 0 (the value is certainly infinite, or a masked score).
    A radius of inf makes no claim about the value.
    """

    __slots__ = ("_rad", "mid")

    def __init__(self, mid: Tensor, rad: Tensor | None = None) -> None:
        self.mid = mid.to(torch.float64)
        self._rad = rad

    @property
    def rad(self) -> Tensor:
        if self._rad is None:
            return torch.zeros((), dtype=torch.float64).expand(self.mid.shape)
        return self._rad

    @property
    def is_exact(self) -> bool:
        """True if the radius is known to be zero everywhere (a cheap, sufficient test)."""
        return self._rad is None or not bool(self._rad.any())

    @property
    def shape(self) -> torch.Size:
        return self.mid.shape

    def __repr__(self) -> str:
        return f"MidRad(shape={tuple(self.shape)}, largest radius={float(self.rad.max()):.3g})"

    # Rounding points ------------------------------------------------------------------------

    def round(self, fmt: Format | None) -> MidRad:
        """A known rounding into `fmt`, replayed: the value is RN(x) for an x in the interval.

        RN is monotone, so RN(mid - rad) and RN(mid + rad) enclose it exactly; the radius is 0
        unless a rounding boundary lies within the radius. Where an end overflows the result
        makes no claim (radius inf), unless both do: then it is certainly infinite.
        """
        if fmt is None or fmt.precision >= FP64.precision:
            return self
        if self.is_exact:
            return MidRad(round_to(self.mid, fmt))
        # The ends themselves are rounded by float64: move them outwards by one more roundoff.
        reach = torch.where(self.rad > 0, self.rad + 2 * EPS64 * self.mid.abs(), self.rad)
        low, high = round_to(self.mid - reach, fmt), round_to(self.mid + reach, fmt)
        near_tie = low != high
        if not bool(near_tie.any()):
            return MidRad(low)
        # Few elements are near a tie, so only these get a midpoint and a radius of their own.
        least, most = low[near_tie], high[near_tie]
        middle = round_to(self.mid[near_tie], fmt)
        lost = ~(least.isfinite() & most.isfinite())
        middle = torch.where(lost, middle.nan_to_num(0.0).clamp(-fmt.max, fmt.max), middle)
        reach = torch.maximum(most - middle, middle - least).masked_fill_(lost, torch.inf)
        rad = torch.zeros_like(low)
        low[near_tie], rad[near_tie] = middle, reach
        return MidRad(low, rad)

    def free(self, fmt: Format | None, times: int = 1) -> MidRad:
        """`times` roundings into `fmt` whose points are unknown.

        Each moves a value by at most u |value| + tiny / 2, so `times` of them move x in
        [mid - rad, mid + rad] by at most ((1+u)^times - 1)(|mid| + rad) + times * tiny / 2
        (grown by the later roundings).
        """
        if fmt is None or times == 0:
            return self
        growth = math.expm1(times * math.log1p(fmt.u))
        rad = self.mid.abs().mul_(growth).add_(times * fmt.tiny / 2 * (1 + growth))
        if self._rad is not None:
            rad = rad.add_(self._rad, alpha=1 + growth)
        rad.masked_fill_(self.mid.isinf(), 0.0)
        return MidRad(self.mid, rad)

    def touch(self, fmt: Format, *, known: bool) -> MidRad:
        """One rounding into `fmt`: replayed if its point is known, else free."""
        return self.round(fmt) if known else self.free(fmt)

    # Arithmetic -----------------------------------------------------------------------------

    def scale(self, factor: float) -> MidRad:
        """Multiply by an exact scalar, before any rounding of the subject."""
        mid = self.mid * factor
        if math.frexp(factor)[0] in (0.5, -0.5):
            return MidRad(mid, None if self._rad is None else self._rad * abs(factor))
        if self._rad is None:
            if _fits_float32(self.mid) and _fits_float32(torch.tensor(factor, dtype=torch.float64)):
                return MidRad(mid)
            return MidRad(mid, _product_error(self.mid, factor, mid))
        rad = (self._rad * abs(factor)).add_(mid.abs(), alpha=2 * EPS64)
        return MidRad(mid, rad.masked_fill_(mid.isinf(), 0.0))

    def __add__(self, other: MidRad) -> MidRad:
        mid = self.mid + other.mid
        rad = _sum_error(self.mid, other.mid, mid)
        return MidRad(mid, rad + self.rad + other.rad)

    def __neg__(self) -> MidRad:
        return MidRad(-self.mid, self._rad)

    def __sub__(self, other: MidRad) -> MidRad:
        return self + (-other)

    def __mul__(self, other: MidRad) -> MidRad:
        mid = self.mid * other.mid
        rad = _product_error(self.mid, other.mid, mid)
        if other._rad is not None:
            rad = rad + (self.mid.abs() + self.rad) * other._rad
        if self._rad is not None:
            rad = rad + other.mid.abs() * self._rad
        return MidRad(mid, rad)

    # Shape ----------------------------------------------------------------------------------

    def _map(self, reshape: Any) -> MidRad:
        return MidRad(reshape(self.mid), None if self._rad is None else reshape(self._rad))

    def __getitem__(self, index: Any) -> MidRad:
        return self._map(lambda tensor: tensor[index])

    @property
    def mT(self) -> MidRad:
        return self._map(lambda tensor: tensor.mT)

    def reshape(self, *shape: int) -> MidRad:
        return self._map(lambda tensor: tensor.reshape(shape))

    def expand(self, *shape: int) -> MidRad:
        return self._map(lambda tensor: tensor.expand(shape))

    def where(self, keep: Tensor, otherwise: float) -> MidRad:
        """Keep the elements where `keep` (broadcast), put the exact constant elsewhere."""
        mid = self.mid.masked_fill(~keep, otherwise)
        return MidRad(mid, None if self._rad is None else self._rad.masked_fill(~keep, 0.0))


def exact(tensor: Tensor) -> MidRad:
    """A tensor whose values are known exactly."""
    return MidRad(tensor)


def cat(parts: Sequence[MidRad], dim: int = -1) -> MidRad:
    """Concatenate along `dim`; exact if all parts are."""
    mid = torch.cat([part.mid for part in parts], dim)
    if all(part._rad is None for part in parts):
        return MidRad(mid)
    return MidRad(mid, torch.cat([part.rad for part in parts], dim))


def stack(parts: Sequence[MidRad], dim: int) -> MidRad:
    """Stack along a new dimension `dim`."""
    mid = torch.stack([part.mid for part in parts], dim)
    if all(part._rad is None for part in parts):
        return MidRad(mid)
    return MidRad(mid, torch.stack([part.rad for part in parts], dim))


def constant(value: float, fmt: Format | None = None) -> MidRad:
    """A scalar, rounded into `fmt` first where the subject stores it there."""
    stored = value if fmt is None else round_scalar(value, fmt)
    return MidRad(torch.tensor(stored, dtype=torch.float64))
