"""Whether an observed output is one that the declared arithmetic can return."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import Format, format_of, half_gaps, round_to
from .midrad import MidRad


def excess(observed: Tensor, expected: MidRad, fmt: Format | None = None) -> Tensor:
    """Distance over allowed radius per element, float64; a correct element has excess <= 1.

    The reals that round to `observed` in its format are the interval between the half gaps to
    its neighbours, closed at ties; +-inf stands for all reals beyond the overflow threshold.
    d is the distance of expected.mid from that interval, and the excess is d / rad: 0 when
    d = 0, inf when d > 0 = rad.

    NaN never passes, observed or expected. An infinity passes only if the program reaches the
    overflow threshold, and a certainly infinite expectation rejects every finite value.

    Args:
        observed: any dtype, values on the grid of `fmt`.
        expected: same shape, the unrounded output of the program.
        fmt: format of the output; that of `observed`'s dtype if absent.

    Raises:
        ValueError: if the shapes differ (no broadcasting: a missing element must not pass).
    """
    if observed.shape != expected.shape:
        raise ValueError(
            f"observed has shape {tuple(observed.shape)}, expected {tuple(expected.shape)}; "
            "compare outputs of one case only"
        )
    fmt = format_of(observed) if fmt is None else fmt
    out, mid, rad = observed.to(torch.float64), expected.mid, expected.rad
    below, above = half_gaps(out, fmt)
    if fmt.overflow == "saturate":
        above = above.masked_fill(out >= fmt.max, torch.inf)
        below = below.masked_fill(out <= -fmt.max, torch.inf)
    # (mid - out) is exact when they are close, also in float64 outputs; mid - (out + gap) isn't.
    distance = torch.maximum((mid - out) - above, (out - mid) - below).clamp_min_(0.0)
    infinite = out.isinf()
    if bool(infinite.any()):
        short = (fmt.overflow_threshold - mid * out.sign()).clamp_min(0.0)
        distance = torch.where(infinite, short, distance)
    # Without a bound the program makes no claim about an element: any number will do.
    ratio = (distance / rad).masked_fill_((distance == 0) | rad.isinf(), 0.0)
    undefined = (distance + rad).isnan()  # a NaN of any of the three
    return ratio.masked_fill_(undefined, torch.inf)


def exact_share(observed: Tensor, expected: MidRad, fmt: Format | None = None) -> float:
    """Share of elements that equal the rounded midpoint bit for bit (-0 equals 0); 1.0 if none."""
    fmt = format_of(observed) if fmt is None else fmt
    if observed.numel() == 0:
        return 1.0
    equal = round_to(expected.mid, fmt) == observed.to(torch.float64)
    return float(equal.to(torch.float64).mean())
