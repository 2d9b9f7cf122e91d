"""Elementwise functions of midpoint-radius tensors, with declared errors."""

from __future__ import annotations

import torch

from .formats import Format
from .midrad import EPS64, MidRad


def tanh(x: MidRad, error: float, fmt: Format) -> MidRad:
    """tanh with relative error at most `error` unit roundoffs of `fmt`.

    Its derivative 1 - tanh^2 is at most that at the end of the interval nearest to zero, so the
    radius shrinks where tanh saturates; |tanh| <= 1 caps the declared error too.
    """
    mid = torch.tanh(x.mid)
    nearest = torch.tanh((x.mid.abs() - x.rad).clamp_min_(0.0))
    rad = (1 - nearest * nearest) * x.rad
    return MidRad(mid, rad + (error * fmt.u + 4 * EPS64) * (mid.abs() + rad))


def divide_by(x: MidRad, divisor: float) -> MidRad:
    """x / divisor for an exact scalar, before any rounding of the subject.

    Exact where float64 is: a power of two. Otherwise float64's rounding enters the radius.
    """
    mid = x.mid / divisor
    back = MidRad(mid).scale(divisor)
    tiny = (x.mid.abs() < 2.0**-900) & (x.mid != 0)  # what is left over may underflow unseen
    inexact = (back.mid != x.mid) | (back.rad != 0) | tiny
    rad = x.rad / abs(divisor) + torch.where(inexact, 2 * EPS64 * mid.abs(), 0.0)
    return MidRad(mid, rad.masked_fill_(mid.isinf(), 0.0))


def exp(x: MidRad, error: float, fmt: Format) -> MidRad:
    """exp with relative error at most `error` unit roundoffs of `fmt`."""
    mid = torch.exp(x.mid)
    relative = torch.expm1(x.rad) + (error * fmt.u + 4 * EPS64) * torch.exp(x.rad)
    return MidRad(mid, mid * relative)


def cosine_sine(angle: MidRad, error: float, fmt: Format) -> tuple[MidRad, MidRad]:
    """(cos, sin) of an angle in radians, each within `error` unit roundoffs of `fmt`.

    |cos(t + d) - cos t| <= |sin t| |d| + d^2 / 2, and the mirror image for the sine.
    """
    cos, sin = torch.cos(angle.mid), torch.sin(angle.mid)
    square = angle.rad * angle.rad / 2
    # Float64's own error: of the function, and of an angle known to 2^-53 relative.
    slack = 4 * EPS64
    relative = error * fmt.u
    return (
        MidRad(cos, sin.abs() * angle.rad + square + relative * cos.abs() + slack),
        MidRad(sin, cos.abs() * angle.rad + square + relative * sin.abs() + slack),
    )
