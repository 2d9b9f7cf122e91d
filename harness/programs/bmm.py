"""Declared arithmetic of batched matrix products: one accumulation, an epilogue, nothing else."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from cases.bmm import BmmCase
from cases.case import Inputs
from harness.arithmetic.dot import Accumulate, Terms, accumulation_radius
from harness.arithmetic.formats import FORMATS, FP32, Format, denormals_are_zero, round_scalar
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import DET, Mode
from harness.subject import Program

EXACT = False
"""Whether the op has no rounding at all, so that its envelope is a single answer."""
LIMITS: dict[str, float] = dict.fromkeys(
    (
        "vnni-columns-paired",
        "accumulated-in-dtype-per-tile",
        "accumulated-in-dtype",
        "split-k-in-dtype",
        "truncated",
        "rounded-before-addend",
        "int8-pairs-saturate",
        "int8-compensation-missing",
    ),
    float("inf"),
)
"""The largest strength of a fault that may pass this op's generator unseen, in the op's first dtype
under the envelope (harness.certificate): 1, the whole fault, where none is given; infinity: the
fault can't show in that dtype."""

_MANTISSA = 2**52 - 1
"""The stored significand bits of a float64."""


@dataclass(frozen=True, kw_only=True)
class BmmArithmetic:
    """A kernel that accumulates the products and applies alpha, beta and the addend at the end.

    accumulate: format and order of the sum, for factors of any format.
    flush_inputs: factors below their format's smallest normal are read as zero (DAZ).
    narrow: roundings of intermediate results into the case's own dtype (a product that is stored
        before the addend comes); their points are unknown, and there are none where the case has
        neither alpha nor addend. The one that makes the output is not among them.
    """

    accumulate: Accumulate = field(default_factory=Accumulate)
    flush_inputs: bool = False
    narrow: int = 0

    def __call__(self, case: BmmCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        a, b = inputs["a"].double(), inputs["b"].double()
        c = inputs["c"].double().expand(case.batch, case.m, case.n) if "c" in inputs else None
        if case.integral:  # int32 holds every partial sum (k < 2**17), float64 too
            return {"out": MidRad(a @ b if c is None else a @ b + c)}
        own = FORMATS[case.dtype]
        if self.flush_inputs:
            a, b = denormals_are_zero(a, own), denormals_are_zero(b, own)
        # A kernel keeps its factors in float32: one rounding, replayed.
        alpha, beta = round_scalar(case.alpha, FP32), round_scalar(case.beta, FP32)
        out = _sum(a, b, alpha, None if c is None else beta * c, self.accumulate, mode)
        out = _exact_where_proven(out, a, b, alpha, c, beta, self.accumulate)
        if case.alpha != 1 or case.addend is not None:
            addend = 0.0 if c is None else (beta * c).abs()
            out = _narrowed(out, addend, own, self.narrow)
        return {"out": out}


def by_dtype(accumulate: Accumulate, **others: BmmArithmetic) -> Program:
    """One accumulator for all dtypes: it holds a product of 16-bit factors, not of float32.

    others: arithmetic of its own for a dtype, by name.
    """
    short = BmmArithmetic(accumulate=replace(accumulate, exact_products=True))
    known = {"float32": BmmArithmetic(accumulate=accumulate), **others}

    def program(case: BmmCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        return known.get(case.dtype, short)(case, inputs, mode)

    return program


def envelope(case: BmmCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
    """What the dtypes alone allow: float32 accumulation in any order, by any hardware.

    Truncating adders, factors and results flushed to zero below the smallest normal, and, with
    alpha or an addend, the product and the scaled addend stored in the case's dtype in between.
    """
    del mode
    out = _ENVELOPE(case, inputs, DET)["out"]
    if case.integral:
        return {"out": out}
    # Reading a subnormal as zero takes its products away, rather than rounding them.
    accumulate = replace(_ENVELOPE.accumulate, subnormals_lost=FORMATS[case.dtype])
    lost = sum(accumulate.unread(inputs["a"].double(), inputs["b"].double()))
    return {"out": MidRad(out.mid, out.rad + 1.01 * abs(case.alpha) * lost)}


_ENVELOPE = BmmArithmetic(
    accumulate=Accumulate(order="any", epilogue=3, flush=True, directed=True), narrow=2
)


class _Scaled(Terms):
    """The terms alpha * a_k b_k, and the addend as one term more, which may be the first.

    Each product meets alpha once, whether the kernel scales the sum, a factor, or every block of
    the sum. The addend moves every partial sum.
    """

    def __init__(self, a: Tensor, b: Tensor, alpha: float, addend: Tensor | None) -> None:
        super().__init__(a, b)
        self._alpha = abs(alpha)
        self._sign = 1.0 if alpha > 0 else -1.0
        self._addend = addend

    def __len__(self) -> int:
        return super().__len__() + (self._addend is not None)

    def _joined(self, x: Tensor, power: int) -> Tensor:
        x = x if self._alpha == 1 else x * self._alpha**power
        return x if self._addend is None else x + self._addend.abs() ** power

    @cached_property
    def total(self) -> Tensor:
        product = super().total * (self._sign * self._alpha)
        return product if self._addend is None else product + self._addend

    @cached_property
    def absolute(self) -> Tensor:
        return self._joined(super().absolute, 1)

    @cached_property
    def square(self) -> Tensor:
        return self._joined(super().square, 2)

    @cached_property
    def fourth(self) -> Tensor:
        return self._joined(super().fourth, 4)

    @cached_property
    def partial(self) -> Tensor:
        return self._joined(super().partial.sqrt(), 1).square()


def _sum(
    a: Tensor, b: Tensor, alpha: float, addend: Tensor | None, acc: Accumulate, mode: Mode
) -> MidRad:
    """alpha * (a @ b) + addend, the way a kernel with that accumulator may compute it."""
    terms = _Scaled(a, b, alpha, addend)
    extra = (alpha != 1) + 2 * (addend is not None)  # alpha; beta * c, and its addition
    rad = accumulation_radius(terms, acc, mode, extra)
    if abs(alpha) != 1:
        # Underflow and overflow may come before the scaling, too.
        rad = rad + abs(alpha) * acc.underflow(a.shape[-1])
        size = Terms(a, b).absolute * (1 + acc.growth(a.shape[-1], extra))
        rad = rad.masked_fill(size >= acc.format.overflow_threshold, torch.inf)
    return MidRad(terms.total, rad)


def _exact_where_proven(
    out: MidRad,
    a: Tensor,
    b: Tensor,
    alpha: float,
    c: Tensor | None,
    beta: float,
    acc: Accumulate,
) -> MidRad:
    """Radius 0 for the elements whose every intermediate result the accumulator holds exactly.

    Let g(x) be the largest power of two that divides all of x. Every product a_k b_k is a multiple
    of q = g(a) g(b), and so is each partial sum, of whichever terms; none is larger than
    S = sum |a_k b_k|. A multiple of q of size at most 2**p q is a number of p bits, so with
    S <= 2**p q no addition rounds, in any tree, with or without FMA. In the same way
    |alpha| S + |beta c| <= 2**p g with g = min(q g(alpha), g(c) g(beta)) covers the scaled terms,
    and q, g at least the smallest result that is kept rules out underflow. Truncating adders keep
    p - 1 bits below the leading one of their largest term, which is all that such numbers have.
    """
    bits = 2.0**acc.format.precision
    least = acc.format.min_normal if acc.flush else acc.format.tiny
    step_a, step_b = _step(a, -1), _step(b, -2)
    size, step = a.abs() @ b.abs(), step_a * step_b
    exact = (size <= bits * step) & (step >= least)
    if alpha != 1 or c is not None:
        scale = float(_step(torch.tensor([alpha], dtype=torch.float64), -1))
        least_scaled = torch.minimum(torch.minimum(step_a, step_b), torch.ones(())) * scale
        size, step = abs(alpha) * size, step * scale
        if c is not None:
            grain = float(_step(torch.tensor([beta], dtype=torch.float64), -1))
            size = size + (beta * c).abs()
            step = torch.minimum(step, _step(c.unsqueeze(-1), -1).squeeze(-1) * grain)
        exact &= (size <= bits * step) & (step >= least) & (least_scaled >= least)
    return MidRad(out.mid, out.rad.masked_fill(exact, 0.0)) if bool(exact.any()) else out


def _step(x: Tensor, dim: int) -> Tensor:
    """The largest power of two that divides every element along `dim`; infinite if all are 0.

    A normal float64 less its lowest set bit differs from it by that bit; without a set bit it is
    a power of two itself. (The subnormals of every other format are normal here.)
    """
    x = x.abs()
    bits = x.view(torch.int64)
    lowest = x - (bits & (bits - 1)).view(torch.float64)
    lowest = torch.where(bits & _MANTISSA == 0, x, lowest)
    return lowest.masked_fill_(x == 0, torch.inf).amin(dim, keepdim=True)


def _narrowed(out: MidRad, addend: Tensor | float, fmt: Format, times: int) -> MidRad:
    """`times` free roundings into `fmt` of the product and of the addend, before they meet."""
    if times == 0:
        return out
    growth = (1 + fmt.u) ** times - 1
    size = (out.mid.abs() + out.rad) + 2 * addend  # |product| <= |sum| + |addend|
    return MidRad(out.mid, out.rad + growth * size + 2 * times * fmt.tiny)
