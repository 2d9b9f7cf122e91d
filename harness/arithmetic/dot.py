"""Matrix products: how far any summation order may carry a kernel from the exact product."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise

import torch
from torch import Tensor

from .formats import FP32, Format
from .midrad import EPS64, MidRad
from .mode import Mode

_SAMPLES = 16
"""Partial sums are sampled at this many block ends, and over this many strided lanes."""

_BATCHED_LIMIT = 1 << 21
"""Above so many sampled partial sums they are computed one block at a time, to save memory."""

_COHERENT_SUM = 0.25
_COHERENT_SPREAD = 1.5

_ORDERS = ("sequential", "any", "simd8", "amx", "pairwise")


def growth(roundings: int, unit: float) -> float:
    """(1 + unit)^roundings - 1, the relative error bound of that many roundings in a row."""
    return math.expm1(min(roundings * math.log1p(unit), 700.0))


@dataclass(frozen=True, kw_only=True)
class Accumulate:
    """How a kernel adds up n products.

    `format`          of the accumulator.
    `order`           sequential | any: at most n - 1 additions on a path of the summation tree;
                      simd8, lanes<L>: L interleaved accumulators, a horizontal sum and a scalar
                      tail; amx: TDPBF16PS, 32 products per instruction; pairwise.
    `exact_products`  the first rounding comes after the product: FMA, or factors so short that
                      the accumulator holds the product.
    `epilogue`        roundings of the finished sum (alpha, beta, bias), each in `format`.
    `flush`           results below the smallest normal become zero (FTZ).
    `subnormals_lost` factors below the smallest normal of this format may be read as zero (DAZ);
                      None: they never are.
    `directed`        the hardware truncates or rounds the wrong way: errors up to one ulp, not
                      half (tensor cores; Khattak & Mikaitis, arXiv:2512.07004).
    """

    format: Format = FP32
    order: str = "sequential"
    exact_products: bool = False
    epilogue: int = 1
    flush: bool = False
    subnormals_lost: Format | None = None
    directed: bool = False

    def __post_init__(self) -> None:
        if self.order not in _ORDERS and not re.fullmatch(r"lanes[1-9]\d*", self.order):
            raise ValueError(
                f"order={self.order!r} is unknown, expected one of {', '.join(_ORDERS)} or "
                "lanes<count>; write the kernel's summation order as one of these, or 'any'"
            )

    @property
    def unit(self) -> float:
        """Largest relative error of one operation."""
        return self.format.u * (2.0 if self.directed else 1.0)

    def additions(self, terms: int) -> int:
        """The largest number of additions that any one of `terms` products goes through."""
        if terms <= 1:
            return 0
        worst = terms - 1
        if self.order in ("sequential", "any"):
            return worst
        if self.order == "pairwise":
            return min(worst, math.ceil(math.log2(terms)) + 1)
        if self.order == "amx":
            # Two chains of 16 from zero, even + odd, then one addition per 32 products.
            return -(-terms // 32) + 17
        lanes = 8 if self.order == "simd8" else int(self.order.removeprefix("lanes"))
        horizontal = math.ceil(math.log2(lanes)) if lanes > 1 else 0
        return min(worst, -(-terms // lanes) + horizontal + lanes - 1)

    def depth(self, terms: int) -> int:
        """Roundings between one product and the finished sum."""
        return self.additions(terms) + self.epilogue + (0 if self.exact_products else 1)

    def growth(self, terms: int, extra: int = 0) -> float:
        """(1 + u)^depth - 1: the relative error bound of a sum of like-signed terms.

        Each product reaches the result times at most `depth` factors (1 + delta), |delta| <= u,
        whatever the tree. Valid for every depth, where gamma_h = hu / (1 - hu) (Higham,
        Accuracy and Stability, 2002, lemma 3.1) needs hu < 1.
        """
        return growth(self.depth(terms) + extra, self.unit)

    def lost(self, x: Tensor) -> Tensor | None:
        """What of each factor may be read as zero; None where nothing is."""
        if self.subnormals_lost is None:
            return None
        lost = x.masked_fill(x.abs() >= self.subnormals_lost.min_normal, 0.0)
        return lost.abs_() if bool(lost.any()) else None

    def unread(self, a: Tensor, b: Tensor) -> list[Tensor]:
        """How far factors of a @ b that are read as zero may move it: |A_lost| |B|, |A| |B_lost|.

        Nothing stands for an operand of which nothing may be lost.
        """
        lost_a, lost_b = self.lost(a), self.lost(b)
        parts = [] if lost_a is None else [lost_a @ b.abs()]
        return parts if lost_b is None else [*parts, a.abs() @ lost_b]

    def underflow(self, terms: int) -> float:
        """Absolute error from underflow of all operations of one accumulation.

        Gradual underflow: only products and the epilogue lose up to tiny / 2 (sums of
        subnormals are exact). Flush to zero: every operation loses up to the smallest normal.
        """
        if self.flush:
            return (2 * terms + 1 + self.epilogue) * self.format.min_normal
        return (terms + self.epilogue) * self.format.tiny * (1.0 if self.directed else 0.5)


class Terms:
    """The terms t_k = a_k b_k of every element of a [..., m, k] @ b [..., k, n], by their sums.

    Sums are made when asked for; each is one matrix product.
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._a = a
        self._b = b

    def __len__(self) -> int:
        return self._a.shape[-1]

    @cached_property
    def total(self) -> Tensor:
        """sum t, the exact result."""
        return self._a @ self._b

    @cached_property
    def absolute(self) -> Tensor:
        """sum |t|."""
        return self._a.abs() @ self._b.abs()

    @cached_property
    def _squares(self) -> tuple[Tensor, Tensor]:
        return self._a * self._a, self._b * self._b

    @cached_property
    def square(self) -> Tensor:
        """sum t^2."""
        a2, b2 = self._squares
        return a2 @ b2

    @cached_property
    def fourth(self) -> Tensor:
        """sum t^4."""
        a2, b2 = self._squares
        return (a2 * a2) @ (b2 * b2)

    @cached_property
    def partial(self) -> Tensor:
        """Mean square of the partial sums that an accumulation may pass through."""
        return partial_mean_square(self._a, self._b)


def partial_mean_square(a: Tensor, b: Tensor) -> Tensor:
    """Mean square size of the partial sums of a [..., m, k] @ b [..., k, n].

    The larger of two estimates: partial sums in natural order at <= 16 block ends (sorted
    inputs make them far larger than a random order would), and a third of the summed squares of
    16 strided lanes (interleaved accumulators meeting alternating signs).
    """
    terms = a.shape[-1]
    size = -(-terms // _SAMPLES)
    blocks = -(-terms // size)
    if terms < blocks * size:
        a = torch.nn.functional.pad(a, (0, blocks * size - terms))
        b = torch.nn.functional.pad(b, (0, 0, 0, blocks * size - terms))
    # Blocks come first, so that each one's products lie together in memory.
    natural_a = a.unflatten(-1, (blocks, size)).movedim(-2, 0)
    natural_b = b.unflatten(-2, (blocks, size)).movedim(-3, 0)
    strided_a = a.unflatten(-1, (size, blocks)).movedim(-1, 0)
    strided_b = b.unflatten(-2, (size, blocks)).movedim(-2, 0)
    if blocks * a[..., 0].numel() * b.shape[-1] <= _BATCHED_LIMIT:
        sums = natural_a @ natural_b
        for before, after in pairwise(sums.unbind(0)):
            after.add_(before)
        natural = sums.square_().sum(0)
        strided = (strided_a @ strided_b).square_().sum(0)
    else:
        running = natural_a[0] @ natural_b[0]
        natural = running.square()
        strided = (strided_a[0] @ strided_b[0]).square_()
        for block in range(1, blocks):
            running += natural_a[block] @ natural_b[block]
            natural.addcmul_(running, running)
            lane = strided_a[block] @ strided_b[block]
            strided.addcmul_(lane, lane)
    return torch.maximum(natural.div_(blocks), strided.div_(3))


def accumulation_radius(terms: Terms, accumulate: Accumulate, mode: Mode, extra: int = 0) -> Tensor:
    """Distance between the exact sum of the terms and what a kernel may return.

    det   growth(depth) * sum |t| + underflow, for any tree of the declared depth.
    prob  The error is sum_k delta_k s_k over the nodes s_k of the tree. Terms in exchangeable
          order have E s_k^2 = T^2 k^2/n^2 + k(n-k)/n^2 (Q - T^2/n) n/(n-1), which sums to
          n (T^2/3 + Q/6); `partial` covers ordered inputs, 2 T^2 + (log2(n+1) + 1) Q covers
          trees and product roundings. So r = lambda u sqrt(h max(T^2/3 + Q/6, partial) + ...),
          never above det. Nearly constant, like-signed terms (T^2 > (sum |t|)^2 / 4 and
          T^2 sum t^4 <= 1.5 Q^3) have rounding errors of one sign: these take the det radius.

    `extra` further roundings lie on each path (rescales of an online softmax). Float64's own
    error of the midpoint, (n + 16) 2^-53 sum |t|, is added. Where sum |t| reaches the
    accumulator's overflow threshold the radius is inf: a partial sum may overflow.
    """
    count = len(terms)
    relative = accumulate.growth(count, extra)
    rad = terms.absolute * relative
    if not mode.proves and count > 1:
        square = terms.square
        total2 = terms.total * terms.total
        walk = torch.maximum(total2.div(3).add_(square, alpha=1 / 6), terms.partial)
        variance = walk.mul_(accumulate.depth(count) + extra).add_(total2, alpha=2)
        variance.add_(square, alpha=math.log2(count + 1) + 1)
        probable = variance.sqrt_().mul_(mode.sigmas * accumulate.unit)
        coherent = total2 > terms.absolute.square().mul_(_COHERENT_SUM)
        if bool(coherent.any()):
            cubed = square.square().mul_(square).mul_(_COHERENT_SPREAD)
            coherent &= total2.mul_(terms.fourth) <= cubed
            probable = torch.where(coherent, rad, probable)
        rad = torch.minimum(rad, probable)
    rad = rad.add_(terms.absolute, alpha=(count + 16) * EPS64)
    rad.add_(accumulate.underflow(count) * (1 + relative))
    over = terms.absolute >= accumulate.format.overflow_threshold / (1 + relative)
    if bool(over.any()):
        rad = rad.masked_fill(over, torch.inf)
    return rad


def dot(a: MidRad, b: MidRad, accumulate: Accumulate, mode: Mode) -> MidRad:
    """a [..., m, k] @ b [..., k, n] as the kernel accumulates it (batch dimensions broadcast).

    Operand radii enter by |A'B' - AB| <= r_A |B| + (|A| + r_A) r_B; in prob mode as independent
    bounded errors, lambda sqrt(r_A^2 B^2), if that is smaller (Hoeffding). Factors that may be
    read as zero take their products away: |A_lost| |B| + |A| |B_lost|.
    """
    terms = Terms(a.mid, b.mid)
    rad = accumulation_radius(terms, accumulate, mode)
    parts = []
    if not a.is_exact:
        parts.append(_operand_radius(a.rad, b.mid.abs(), mode))
    if not b.is_exact:
        parts.append(_operand_radius(a.mid.abs() + a.rad, b.rad, mode))
    parts += accumulate.unread(a.mid, b.mid)  # read as zero together, in both modes
    if parts:
        # The kernel accumulates the perturbed terms, whose magnitudes are larger by `spread`.
        spread = reduce(torch.add, parts)
        rad = rad + spread * (1 + accumulate.growth(len(terms)))
    return MidRad(terms.total, rad)


def _operand_radius(left: Tensor, right: Tensor, mode: Mode) -> Tensor:
    """Largest effect of independent errors bounded by the factors' products, linear if proven."""
    linear = left @ right
    if mode.proves:
        return linear
    return torch.minimum(linear, ((left * left) @ (right * right)).sqrt_().mul_(mode.sigmas))
