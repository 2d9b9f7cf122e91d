"""Matrix products: how far any summation order may carry a kernel from the exact product."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

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
    `directed`        the hardware truncates or rounds the wrong way: errors up to one ulp, not
                      half (tensor cores; Khattak & Mikaitis, arXiv:2512.07004).
    """

    format: Format = FP32
    order: str = "sequential"
    exact_products: bool = False
    epilogue: int = 1
    flush: bool = False
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

    def underflow(self, terms: int) -> float:
        """Absolute error from underflow of all operations of one accumulation.

        Gradual underflow: only products and the epilogue lose up to tiny / 2 (sums of
        subnormals are exact). Flush to zero: every operation loses up to the smallest normal.
        """
        if self.flush:
            return (2 * terms + 1 + self.epilogue) * self.format.min_normal
        return (terms + self.epilogue) * self.format.tiny * (1.0 if self.directed else 0.5)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Power sums of the terms t_k = a_k b_k of every output element (tensors of one shape).

    `total` sum t, `absolute` sum |t|, `square` sum t^2; for prob radii also `fourth` sum t^4 and
    `partial`, the mean square of the partial sums that an accumulation may pass through.
    """

    total: Tensor
    absolute: Tensor
    square: Tensor | None = None
    fourth: Tensor | None = None
    partial: Tensor | None = None


def moments(a: Tensor, b: Tensor, mode: Mode) -> Moments:
    """Moments of a [..., m, k] @ b [..., k, n]; absolute only, in det mode."""
    total, absolute = a @ b, a.abs() @ b.abs()
    if mode.proves:
        return Moments(total=total, absolute=absolute)
    a2, b2 = a * a, b * b
    return Moments(
        total=total,
        absolute=absolute,
        square=a2 @ b2,
        fourth=(a2 * a2) @ (b2 * b2),
        partial=partial_mean_square(a, b),
    )


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
    natural_a = a.unflatten(-1, (blocks, size)).movedim(-2, -3)
    natural_b = b.unflatten(-2, (blocks, size))
    strided_a = a.unflatten(-1, (size, blocks)).movedim(-1, -3)
    strided_b = b.unflatten(-2, (size, blocks)).movedim(-2, -3)
    if blocks * a[..., :1].numel() * b.shape[-1] <= _BATCHED_LIMIT:
        natural = (natural_a @ natural_b).cumsum(-3).square_().mean(-3)
        strided = (strided_a @ strided_b).square_().sum(-3)
        return torch.maximum(natural, strided.div_(3))
    running = natural_a[..., 0, :, :] @ natural_b[..., 0, :, :]
    natural = running.square()
    strided = (strided_a[..., 0, :, :] @ strided_b[..., 0, :, :]).square_()
    for block in range(1, blocks):
        running += natural_a[..., block, :, :] @ natural_b[..., block, :, :]
        natural.addcmul_(running, running)
        lane = strided_a[..., block, :, :] @ strided_b[..., block, :, :]
        strided.addcmul_(lane, lane)
    return torch.maximum(natural.div_(blocks), strided.div_(3))


def accumulation_radius(
    sums: Moments, terms: int, accumulate: Accumulate, mode: Mode, extra: int = 0
) -> Tensor:
    """Distance between the exact sum of `terms` products and what a kernel may return.

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
    relative = accumulate.growth(terms, extra)
    rad = sums.absolute * relative
    if not mode.proves and terms > 1:
        square, fourth, partial = sums.square, sums.fourth, sums.partial
        if square is None or fourth is None or partial is None:
            raise ValueError("mode=prob needs all moments; call moments(a, b, mode) with it")
        total2 = sums.total * sums.total
        depth = accumulate.depth(terms) + extra
        walk = torch.maximum(total2.div(3).add_(square, alpha=1 / 6), partial)
        variance = walk.mul_(depth).add_(total2, alpha=2)
        variance.add_(square, alpha=math.log2(terms + 1) + 1)
        probable = variance.sqrt_().mul_(mode.sigmas * accumulate.unit)
        coherent = (total2 > sums.absolute.square().mul_(_COHERENT_SUM)) & (
            total2 * fourth <= _COHERENT_SPREAD * square**3
        )
        rad = torch.where(coherent, rad, torch.minimum(rad, probable))
    rad = rad.add_(sums.absolute, alpha=(terms + 16) * EPS64)
    rad.add_(accumulate.underflow(terms) * (1 + relative))
    over = sums.absolute >= accumulate.format.overflow_threshold / (1 + relative)
    if bool(over.any()):
        rad = rad.masked_fill(over, torch.inf)
    return rad


def dot(a: MidRad, b: MidRad, accumulate: Accumulate, mode: Mode) -> MidRad:
    """a [..., m, k] @ b [..., k, n] as the kernel accumulates it (batch dimensions broadcast).

    Operand radii enter by |A'B' - AB| <= r_A |B| + (|A| + r_A) r_B; in prob mode as independent
    bounded errors, lambda sqrt(r_A^2 B^2), if that is smaller (Hoeffding).
    """
    sums = moments(a.mid, b.mid, mode)
    terms = a.shape[-1]
    rad = accumulation_radius(sums, terms, accumulate, mode)
    spread = None
    if not a.is_exact:
        spread = _operand_radius(a.rad, b.mid.abs(), mode)
    if not b.is_exact:
        part = _operand_radius(a.mid.abs() + a.rad, b.rad, mode)
        spread = part if spread is None else spread + part
    if spread is not None:
        # The kernel accumulates the perturbed terms, whose magnitudes are larger by `spread`.
        rad = rad + spread * (1 + accumulate.growth(terms))
    return MidRad(sums.total, rad)


def _operand_radius(left: Tensor, right: Tensor, mode: Mode) -> Tensor:
    """Largest effect of independent errors bounded by the factors' products, linear if proven."""
    linear = left @ right
    if mode.proves:
        return linear
    return torch.minimum(linear, ((left * left) @ (right * right)).sqrt_().mul_(mode.sigmas))
