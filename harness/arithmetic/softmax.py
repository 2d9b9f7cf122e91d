"""The fused softmax-times-values of attention: how far a correct kernel may be off."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .dot import Accumulate, Terms, accumulation_radius, growth
from .exponential import Exp
from .formats import Format
from .midrad import EPS64, MidRad, cat
from .mode import Mode

_LARGEST_LOG_ERROR = 300.0
"""Log-weight errors are capped here: e^300 says 'anything' and keeps float64 finite."""

_WIDE = 0.05
"""Above this log-weight error the convex hull of V is tried as a bound on the average."""


PLAIN_SUM = Accumulate(exact_products=True, epilogue=0)
"""A running sum of numbers that are already there: nothing is multiplied."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxPV:
    """How a kernel computes softmax(scores) @ V.

    `exp`             its exponential, in units of the roundoff of `sum.format`.
    `sum`             accumulation of the denominator.
    `pv`              accumulation of the weighted sum of values.
    `weights`         format in which the weights are stored before they meet V; None: not
                      rounded beyond the accumulator's format.
    `rounded_at`      norm: the normalised weight is rounded; exp: exp(s - running max) is.
    `rounding_known`  the rounding is replayed; False: it happens somewhere, and the denominator
                      may add up rounded or unrounded weights.
    `divisions`       roundings of the normalisation (reciprocal, multiply, log-sum-exp).
    `shift`           format into which s - max is rounded before exp; None: the accumulator's.
    `shift_known`     that rounding is replayed; False: it may happen.
    `block`           keys per block of an online softmax; 0: the whole row at once.
    """

    exp: Exp = field(default_factory=Exp)
    sum: Accumulate = field(default=PLAIN_SUM)
    pv: Accumulate = field(default_factory=Accumulate)
    weights: Format | None = None
    rounded_at: Literal["norm", "exp"] = "norm"
    rounding_known: bool = True
    divisions: int = 2
    shift: Format | None = None
    shift_known: bool = True
    block: int = 0


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The weights of every row, and what is known of their errors; n keys, the sink last.

    Relative errors are errors of the logarithm. Per key, [..., m, n]:
    `local`        exp(s_j - running max), the weight when it is made,
    `rescale`      the factor from there to exp(s_j - max) (None: 1),
    `p`            the normalised weight,
    `rho`          relative error of a weight, up to the row's common factor,
    `rescale_rho`  relative error of `rescale`,
    `far`          the weight of keys that may have been flushed to zero (None: no such key),
    `lifted`       p (e^rho - 1), up to a common factor of the row's weights,
    `linear`, `odd`  in prob mode the same, split by what averages out (None: nothing does).
    Per row, [..., m, 1]:
    `denominator`  sum of the weights,
    `maximum`      the largest score,
    `base`         absolute error of the running maximum (per key, if there are blocks),
    `largest`      the largest rho,
    `lift`         sum of p (e^rho - 1), without a common factor,
    `spread`       relative error of the denominator that comes from rho,
    `dead`         rows without any key,
    `void`         rows of which nothing is known (None: no row).
    """

    local: Tensor
    rescale: Tensor | None
    denominator: Tensor
    p: Tensor
    rho: Tensor
    base: Tensor
    rescale_rho: Tensor | None
    far: Tensor | None
    largest: Tensor
    maximum: Tensor
    lifted: Tensor
    linear: Tensor | None
    odd: Tensor | None
    lift: Tensor
    spread: Tensor
    dead: Tensor
    void: Tensor | None
    blocks: int


def _weigh(
    scores: MidRad, spec: SoftmaxPV, mode: Mode, sink: MidRad | None, independent: bool
) -> _Row:
    if sink is not None:
        scores = cat([scores, sink.expand(*scores.shape[:-1], 1)])
    s, r = scores.mid, scores.rad
    keys = s.shape[-1]
    hidden = s == -torch.inf
    void = None
    r = r.masked_fill(hidden, 0.0)
    if not bool(torch.isfinite(r.sum() + s.masked_fill(hidden, 0.0).sum())):
        void = ((~s.isfinite() & ~hidden) | ~r.isfinite()).any(-1, keepdim=True)
        s = s.masked_fill(void, 0.0)
        r = r.masked_fill(void, 0.0)
        hidden = hidden & ~void
    maximum = s.amax(-1, keepdim=True)
    dead = maximum == -torch.inf
    maximum = maximum.masked_fill(dead, 0.0)
    x = s - maximum
    u = spec.sum.unit
    scores_exact = not bool(r.any())
    # max is 1-Lipschitz: the kernel's maximum lies between max(s - r) and max(s + r).
    if scores_exact:
        base = torch.zeros_like(maximum)
    else:
        high, low = (s + r).amax(-1, keepdim=True), (s - r).amax(-1, keepdim=True)
        base = torch.maximum(high - maximum, maximum - low).masked_fill_(dead, 0.0)
    random = None if scores_exact else r
    if spec.shift is not None and spec.shift_known:
        shifted = MidRad(x, None if scores_exact else r + base).round(spec.shift)
        x, r = shifted.mid, shifted.rad.masked_fill(hidden, 0.0)
        random = None if shifted.is_exact else r
        base = torch.zeros_like(base)
        if not bool(torch.isfinite(r.sum())):
            r = r.nan_to_num(_LARGEST_LOG_ERROR, _LARGEST_LOG_ERROR)
            random = r
    reach = x.abs().masked_fill_(hidden, 0.0)
    if random is not None:
        reach = reach + r + base
    # The subtraction s - m, rounded, and the exponential itself; 2^-50 covers float64.
    units = u * (1 + spec.exp.e1) + 8 * EPS64
    if spec.shift is not None and not spec.shift_known:
        units += spec.shift.u
    rho = reach.mul(units).add_(u * spec.exp.e0 + 8 * EPS64)
    if spec.shift is not None and not spec.shift_known:
        rho.add_(spec.shift.tiny / 2)
    blocks = -(-keys // spec.block) if spec.block else 1
    if blocks > 1:
        # Each rescale exponentiates once more; the distances of all rescales add up to `reach`.
        rho.add_(blocks * u * (spec.exp.e0 + 1))
    systematic = rho
    if random is not None:
        rho = rho + random
    rho = rho.clamp_max(_LARGEST_LOG_ERROR)
    rescale = rescale_rho = None
    if blocks > 1:
        local, rescale, base, rescale_rho = _online(s, r, spec, maximum)
        weight = local * rescale
    else:
        weight = local = spec.exp(x)
    denominator = weight.sum(-1, keepdim=True).masked_fill_(dead, 1.0)
    p = weight / denominator
    far = None
    flushable = reach > -spec.exp.flush
    if bool(flushable.any()):
        far = torch.exp(x + rho).masked_fill_(~flushable, 0.0)
    lifted = p * torch.expm1(rho)
    lift = spread = lifted.sum(-1, keepdim=True)
    odd = linear = None
    averaging = random if independent and not mode.proves else None
    if averaging is not None:
        odd, linear = _split(p, systematic, averaging, lifted)
        averaged = odd.square().sum(-1, keepdim=True).sqrt_().mul_(mode.sigmas)
        spread = torch.minimum(lift, linear.sum(-1, keepdim=True) + averaged)
    share, top = p.max(-1, keepdim=True)
    dominant = share > 0.5
    if bool(dominant.any()):
        # Only differences of log errors matter: where one key has most of the weight its error
        # is moved to the others, which leaves Cauchy-Schwarz the light ones to average over.
        lifted = p * torch.expm1(_relative_to(top, dominant, rho))
        if averaging is not None:
            common = _relative_to(top, dominant, systematic)
            both = (common + averaging).clamp_max_(_LARGEST_LOG_ERROR)
            odd, linear = _split(p, common, averaging, p * torch.expm1(both))
    return _Row(
        local=local,
        rescale=rescale,
        denominator=denominator,
        p=p,
        rho=rho,
        base=base,
        rescale_rho=rescale_rho,
        far=far,
        largest=rho.masked_fill(hidden, 0.0).amax(-1, keepdim=True),
        maximum=maximum,
        lifted=lifted,
        linear=linear,
        odd=odd,
        lift=lift,
        spread=torch.log1p(spread),
        dead=dead,
        void=void,
        blocks=blocks,
    )


def _split(p: Tensor, systematic: Tensor, random: Tensor, lifted: Tensor) -> tuple[Tensor, Tensor]:
    """`lifted` = p (e^(systematic + random) - 1) as (odd, rest).

    For random parts that are symmetric and independent per key, sinh(random) averages out.
    """
    odd = p * torch.exp(systematic) * torch.sinh(random.clamp_max(_LARGEST_LOG_ERROR))
    odd = torch.minimum(odd, lifted)
    return odd, lifted - odd


def _relative_to(top: Tensor, dominant: Tensor, rho: Tensor) -> Tensor:
    """Log errors relative to that of the key `top`, in the rows where it is `dominant`."""
    anchor = rho.gather(-1, top)
    moved = rho + anchor.masked_fill(~dominant, 0.0)
    moved = moved.scatter(-1, top, anchor.masked_fill(dominant, 0.0))
    return moved.clamp_max_(_LARGEST_LOG_ERROR)


def _online(
    s: Tensor, r: Tensor, spec: SoftmaxPV, maximum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights as an online softmax forms them: (local, rescale, base, rescale_rho), per key.

    Block b uses exp(s - m_b), m_b the maximum of all blocks so far, and is later multiplied by
    exp(m_b - m). Where no later key can exceed m_b that factor is exactly 1.
    """
    local, rescale, base, drift = [], [], [], []
    parts = list(zip(s.split(spec.block, -1), r.split(spec.block, -1), strict=True))
    highs = torch.cat([(a + b).amax(-1, keepdim=True) for a, b in parts], -1)
    lows = torch.cat([(a - b).amax(-1, keepdim=True) for a, b in parts], -1).cummax(-1)[0]
    running = torch.cat([a.amax(-1, keepdim=True) for a, _ in parts], -1).cummax(-1)[0]
    later = highs.flip(-1).cummax(-1)[0].flip(-1)
    later = torch.cat([later[..., 1:], torch.full_like(maximum, -torch.inf)], -1)
    highs = highs.cummax(-1)[0]
    seen = running > -torch.inf
    anchor = running.masked_fill(~seen, 0.0)
    error = torch.maximum(highs - running, running - lows).masked_fill_(~seen, 0.0)
    settled = later <= lows
    factor = torch.exp(anchor - maximum).masked_fill_(~seen, 1.0).masked_fill_(settled, 1.0)
    distance = (maximum - anchor).masked_fill_(~seen, 0.0)
    last = error[..., -1:]
    u = spec.sum.unit
    count = len(parts)
    wander = (
        error + last + u * (1 + spec.exp.e1) * (distance + last) + count * u * (spec.exp.e0 + 1)
    )
    wander = wander.masked_fill_(settled, 0.0)
    for index, (block, _) in enumerate(parts):
        at = slice(index, index + 1)
        local.append(spec.exp(block - anchor[..., at]))
        rescale.append(factor[..., at].expand_as(block))
        base.append(error[..., at].expand_as(block))
        drift.append(wander[..., at].expand_as(block))
    return (torch.cat(local, -1), torch.cat(rescale, -1), torch.cat(base, -1), torch.cat(drift, -1))


def softmax_pv(
    scores: MidRad,
    values: MidRad,
    spec: SoftmaxPV,
    mode: Mode,
    sink: MidRad | None = None,
    *,
    independent: bool = True,
) -> MidRad:
    """softmax([scores, sink]) @ [values; 0], fused.

    With w_j the weights of the program and w_j e^(eta_j), |eta_j| <= rho_j, those of the kernel,
    p = w / sum w and o = sum p_j v_j:

        o' - o = sum p_j (e^eta_j - 1)(v_j - o) / sum p_j e^eta_j ,

    exactly, since sum p_j (v_j - o) = 0. So score errors act only through the spread of V, the
    common factor of the shift cancels, and with W_j = p_j (e^rho_j - 1), Cauchy-Schwarz and
    1 / sum p e^-rho <= 1 + sum W (Jensen),

        |o' - o| <= sqrt(W0 (W V^2 - 2 o W V + o^2 W0)) (1 + W0) ,   W0 = sum W.

    A common factor of all weights cancels, so where one key holds more than half of the weight
    the errors are taken relative to that key's (its own becomes 0, that of the others grows by
    it): the inequality is then nearly tight for peaked rows too.


    rho_j = r_j + u |s_j - m| + (e0 + e1 |s_j - m|) u. In prob mode the score radii r_j are
    independent bounded errors: their odd part sinh(r_j) enters as lambda sqrt(sum W^2 (v - o)^2)
    (Hoeffding), all else linearly. Roundings of stored weights, and the denominator, are linear
    in both modes: equal weights round alike.

    Args:
        scores: [..., m, n]; mid -inf marks a hidden key.
        values: [..., n, d], finite; rows of hidden keys may hold anything finite.
        sink: broadcastable to [..., m, 1], a key of value 0.
        independent: score radii of different keys are independent (they are not where they
            come from a shared operand, e.g. a query with a radius).

    Returns:
        [..., m, d], before any rounding of the output. Rows with neither a visible key nor a
        sink are exactly 0. Rows with an unbounded score have radius inf.
    """
    row = _weigh(scores, spec, mode, sink, independent)
    v, keys = values.mid, values.shape[-2]
    d = v.shape[-1]

    def seen(weights: Tensor) -> Tensor:
        """Drop the sink's column: its value is 0."""
        return weights if sink is None else weights[..., :keys]

    p = seen(row.p)
    v_abs = v.abs()
    v_sum = v_abs.sum(-2, keepdim=True)
    both = torch.cat([v, v * v], -1)
    terms = Terms(p, v)
    terms.absolute = p @ v_abs
    o, absolute = terms.total, terms.absolute

    def centred(weights: Tensor) -> Tensor:
        """sum_j weights_j (v_j - o)^2, with the cancellation in float64 paid for."""
        products = seen(weights) @ both
        first, second = products[..., :d], products[..., d:]
        total = weights.sum(-1, keepdim=True)
        square = o * o * total
        moment = (second - 2 * o * first).add_(square)
        return moment.add_(second.add_(square), alpha=(keys + 16) * 4 * EPS64).clamp_min_(0.0)

    total = row.lifted.sum(-1, keepdim=True)
    sensitivity = (total * centred(row.lifted)).sqrt_().mul_(1 + total)
    if row.odd is not None and row.linear is not None:
        averaged = centred(row.odd.square()).sqrt_().mul_(mode.sigmas)
        total = row.linear.sum(-1, keepdim=True)
        straight = (total * centred(row.linear)).sqrt_()
        total = total + row.odd.sum(-1, keepdim=True)
        sensitivity = torch.minimum(sensitivity, (straight + averaged) * (1 + total))
    if bool((row.largest > _WIDE).any()):
        top, bottom = v.amax(-2, keepdim=True), v.amin(-2, keepdim=True)
        if sink is not None:
            top, bottom = top.clamp_min(0.0), bottom.clamp_max(0.0)
        # Any weights give an average within the hull of the values.
        sensitivity = torch.minimum(sensitivity, torch.maximum(top - o, o - bottom))
    if row.far is not None:
        far = row.far
        flushed = seen(far) @ v_abs + far.sum(-1, keepdim=True) * o.abs()
        sensitivity = sensitivity + flushed / row.denominator * (1 + row.lift)

    # The kernel's own weights exceed p by at most this factor.
    swell = torch.exp(2 * row.largest.clamp_max(_LARGEST_LOG_ERROR))
    swell = torch.minimum(swell, torch.exp(row.largest) * (1 + row.lift)).nan_to_num()
    rescales = 2 * row.blocks if row.blocks > 1 else 0
    accumulated = accumulation_radius(terms, spec.pv, mode, rescales) * swell
    # Weights that underflow: each may lose one spacing of the subnormals, or the whole.
    lost = spec.sum.format.min_normal if spec.pv.flush else spec.sum.format.tiny
    accumulated = accumulated + v_sum * lost
    if (unread := spec.pv.lost(v)) is not None:
        accumulated = accumulated + (p @ unread) * swell
    if not values.is_exact:
        accumulated = accumulated + (p @ values.rad) * swell
    tail = growth(spec.sum.depth(keys + 1) + spec.divisions + rescales, spec.sum.unit)
    inner = sensitivity + accumulated
    plain = inner + tail * (o.abs() + inner)
    mid, rad = o, plain
    fmt = spec.weights
    if fmt is not None and fmt.precision < spec.sum.format.precision:
        scale = 1.0 if spec.rounded_at == "norm" else row.denominator
        rounding = (fmt.u * absolute + v_sum * (fmt.tiny / 2) / scale) * swell
        if not spec.rounding_known:
            # Rounded weights may enter numerator and denominator: |o| once more.
            rad = plain * (1 + 2 * fmt.u) + rounding + fmt.u * o.abs() * swell
        else:
            rad = plain + rounding * (1 + tail)
            mid, narrow = _rounded(row, spec, seen, v, v_abs, accumulated, tail)
            slack = spec.pv.growth(keys, rescales) * (
                2 * fmt.u * absolute * swell + v_sum * fmt.tiny
            )
            narrow = narrow + slack
            use = narrow <= rad
            mid, rad = torch.where(use, mid, o), torch.where(use, narrow, rad)
    rad = rad * (1 + 2.0**-40)
    if bool(row.dead.any()):
        mid, rad = mid.masked_fill(row.dead, 0.0), rad.masked_fill(row.dead, 0.0)
    if row.void is not None:
        mid, rad = mid.masked_fill(row.void, 0.0), rad.masked_fill(row.void, torch.inf)
    return MidRad(mid, rad)


def _rounded(
    row: _Row,
    spec: SoftmaxPV,
    seen: Callable[[Tensor], Tensor],
    v: Tensor,
    v_abs: Tensor,
    accumulated: Tensor,
    tail: float,
) -> tuple[Tensor, Tensor]:
    """(mid, rad) of the weighted sum with the weights' rounding into `spec.weights` replayed.

    The stored weight is RN of something within e^(+-kappa) of the program's, so it lies between
    RN of the two ends; away from a tie that is a single value. Flips are linear in both modes.
    """
    if spec.rounded_at == "norm":
        p = seen(row.p)
        kappa = torch.expm1(seen(row.rho) + row.spread + math.log1p(tail))
        reach = p * kappa
        if row.far is not None:
            reach = reach + seen(row.far) / row.denominator
        stored = MidRad(p, reach).round(spec.weights)
        mid = stored.mid @ v
        rad = stored.rad @ v_abs if bool(stored.rad.any()) else torch.zeros_like(mid)
        return mid, rad + accumulated
    base = row.base if row.rescale is None else seen(row.base)
    local = seen(row.local)
    reach = local * torch.expm1((seen(row.rho) + base).clamp_max(_LARGEST_LOG_ERROR))
    if row.far is not None:
        # The flush acts on the local exponent, which is nearer to zero than the final one.
        lost = local + math.exp(min(spec.exp.flush + 1.0, 0.0))
        reach = reach + lost.masked_fill_(seen(row.far) == 0, 0.0)
    stored = MidRad(local, reach).round(spec.weights)
    weights, error = stored.mid, stored.rad
    if row.rescale is not None and row.rescale_rho is not None:
        rescale, wander = seen(row.rescale), torch.expm1(seen(row.rescale_rho).clamp_max(300.0))
        error = rescale * (error + (weights + error) * wander)
        weights = weights * rescale
        last = row.base[..., -1:]
    else:
        last = row.base
    mid = (weights / row.denominator) @ v
    rad = accumulated
    if bool(error.any()):
        rad = rad + (error / row.denominator) @ v_abs
    # The denominator adds unrounded weights, in the kernel's own units.
    relative = torch.expm1((row.spread + last).clamp_max(300.0) + math.log1p(tail))
    return mid, rad + relative * (mid.abs() + rad)


def log_sum_exp(
    scores: MidRad,
    spec: SoftmaxPV,
    mode: Mode,
    sink: MidRad | None = None,
    *,
    independent: bool = True,
) -> MidRad:
    """log sum_j exp(s_j) over the visible keys and the sink, [..., m, 1], natural logarithm.

    The common shift cancels, so |lse' - lse| <= log(1 + sum p_j (e^rho_j - 1)) for the weights,
    plus the sum's own roundings, the logarithm's (2 units) and that of the final addition.
    Rows with neither key nor sink are exactly -inf.
    """
    row = _weigh(scores, spec, mode, sink, independent)
    log = torch.log(row.denominator)
    mid = row.maximum + log
    keys = row.p.shape[-1]
    u = spec.sum.unit
    tail = (spec.sum.depth(keys) + (row.blocks if row.blocks > 1 else 0)) * u
    rad = row.spread + tail * (1 + tail)
    if row.far is not None:
        rad = rad + row.far.sum(-1, keepdim=True) / row.denominator
    reach = row.maximum.abs() + row.base[..., -1:]
    rad = rad + (2 * u + 8 * EPS64) * (log.abs() + rad) + (u + 8 * EPS64) * (mid.abs() + reach)
    rad = rad + EPS64 * (keys + 16)
    if bool(row.dead.any()):
        mid, rad = mid.masked_fill(row.dead, -torch.inf), rad.masked_fill(row.dead, 0.0)
    if row.void is not None:
        mid, rad = mid.masked_fill(row.void, 0.0), rad.masked_fill(row.void, torch.inf)
    return MidRad(mid, rad)
