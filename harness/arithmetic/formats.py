"""Binary floating-point formats, emulated exactly on float64 tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_BIAS = 1023
_STORED_BITS = 52
_EXPONENT = 0x7FF << _STORED_BITS
_ONE_AND_A_HALF = 1 << (_STORED_BITS - 1)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary format: `precision` significand bits (the implicit one included), normal
    exponents emin..emax, gradual underflow.

    `overflow` says what a value above the largest finite one becomes; `largest` is given only
    where the format is not IEEE there (e4m3fn spends its top code on NaN).
    """

    name: str
    precision: int
    emin: int
    emax: int
    overflow: Literal["inf", "nan", "saturate"] = "inf"
    largest: float | None = None

    @property
    def u(self) -> float:
        """Unit roundoff: the largest relative error of rounding to nearest."""
        return 2.0**-self.precision

    @property
    def tiny(self) -> float:
        """The smallest positive value, and the spacing of the subnormals."""
        return math.ldexp(1.0, self.emin - self.precision + 1)

    @property
    def min_normal(self) -> float:
        return math.ldexp(1.0, self.emin)

    @property
    def max(self) -> float:
        """The largest finite value."""
        if self.largest is not None:
            return self.largest
        return (2.0 - 2.0 ** (1 - self.precision)) * 2.0**self.emax

    @property
    def overflow_threshold(self) -> float:
        """The least real that rounds past `max`, as a closed bound.

        Half a spacing above `max`. Round-to-nearest-even sends the tie itself to infinity in
        the IEEE formats; in e4m3fn it stays at 448. Verdicts close ties on both sides.
        """
        return self.max + math.ldexp(1.0, self.emax - self.precision)

    def saturating(self) -> Format:
        """The same format with overflow clamped to `max`."""
        return Format(
            name=f"{self.name}_saturating",
            precision=self.precision,
            emin=self.emin,
            emax=self.emax,
            overflow="saturate",
            largest=self.largest,
        )


FP64 = Format(name="float64", precision=53, emin=-1022, emax=1023)
FP32 = Format(name="float32", precision=24, emin=-126, emax=127)
BF16 = Format(name="bfloat16", precision=8, emin=-126, emax=127)
FP16 = Format(name="float16", precision=11, emin=-14, emax=15)
FP8_E4M3 = Format(name="float8_e4m3fn", precision=4, emin=-6, emax=8, overflow="nan", largest=448.0)
FP8_E5M2 = Format(name="float8_e5m2", precision=3, emin=-14, emax=15)

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (FP64, FP32, BF16, FP16, FP8_E4M3, FP8_E5M2)}


def format_of(tensor: Tensor) -> Format:
    """The format of a tensor's own dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise ValueError(
            f"dtype={name} has no binary format here, expected one of {', '.join(FORMATS)}; "
            "add it to harness/arithmetic/formats.py"
        )
    return FORMATS[name]


def _power_of_two(x: Tensor, low: int, high: int) -> Tensor:
    """The bits of 2^floor(log2 |x|), int64, the exponent held within low..high."""
    bits = x.view(torch.int64).bitwise_and(_EXPONENT)
    return bits.clamp_((low + _BIAS) << _STORED_BITS, (high + _BIAS) << _STORED_BITS)


def round_to(x: Tensor, fmt: Format) -> Tensor:
    """Round float64 `x` to the nearest value of `fmt`, ties to even.

    Exact for every x: adding and subtracting 1.5 * 2^52 * q, with q the spacing of `fmt` at
    |x|, makes float64's own rounding fall on multiples of q. The exponent is held at emin from
    below, which is gradual underflow. Signs of zero are kept, NaN stays NaN.
    """
    if fmt.precision >= FP64.precision:
        return x
    if x.numel() == 0:
        return x
    bits = _power_of_two(x, fmt.emin, fmt.emax + 1)
    bits.add_(((_STORED_BITS + 1 - fmt.precision) << _STORED_BITS) | _ONE_AND_A_HALF)
    magic = bits.view(torch.float64)
    rounded = (x + magic).sub_(magic).copysign_(x)
    if fmt.overflow == "saturate":
        return rounded.clamp_(-fmt.max, fmt.max)
    least, most = rounded.aminmax()
    # Negated, so that a NaN, which aminmax hands on, takes the slow way too.
    if not (float(least) >= -fmt.max and float(most) <= fmt.max):
        beyond = torch.nan if fmt.overflow == "nan" else torch.inf
        over = rounded.abs() > fmt.max
        rounded = torch.where(over, torch.full_like(x, beyond).copysign_(x), rounded)
    return rounded


def round_scalar(x: float, fmt: Format) -> float:
    """`round_to` for one Python float."""
    return float(round_to(torch.tensor(x, dtype=torch.float64), fmt))


def denormals_are_zero(x: Tensor, fmt: Format) -> Tensor:
    """Values below the smallest normal of `fmt` read as zero (DAZ)."""
    return x.masked_fill(x.abs() < fmt.min_normal, 0.0)


def ulp(x: Tensor, fmt: Format) -> Tensor:
    """The spacing of `fmt` in the binade of |x|; at a power of two, the spacing above it."""
    power = _power_of_two(x, fmt.emin, fmt.emax).view(torch.float64)
    return power.mul_(2.0 ** (1 - fmt.precision))


def half_gaps(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Half the distance from each value x of `fmt` to its neighbour (below, above).

    At a normal power of two the neighbour towards zero lies in the finer binade, so that gap is
    half as wide. Zero and the smallest normal have the subnormal spacing on both sides.
    """
    outer = ulp(x, fmt).mul_(0.5)
    magnitude = x.abs()
    power_of_two = (x.view(torch.int64) & ((1 << _STORED_BITS) - 1)) == 0
    narrowed = power_of_two & (magnitude > fmt.min_normal)
    inner = torch.where(narrowed, outer * 0.5, outer)
    negative = x < 0
    return torch.where(negative, outer, inner), torch.where(negative, inner, outer)
