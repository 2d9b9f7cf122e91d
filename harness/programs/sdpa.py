"""The declared arithmetic of attention kernels, and the envelope of any of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from cases.sdpa import SdpaCase
from harness.arithmetic.dot import Accumulate, dot
from harness.arithmetic.elementwise import divide_by, tanh
from harness.arithmetic.exponential import Exp, cubic_exp
from harness.arithmetic.formats import BF16, FORMATS, FP32, FP64, Format, round_scalar
from harness.arithmetic.midrad import MidRad, cat
from harness.arithmetic.mode import DET, Mode
from harness.arithmetic.softmax import PLAIN_SUM, SoftmaxPV, log_sum_exp, softmax_pv

EXACT = False
"""Whether the op has no rounding at all, so that its envelope is a single answer."""
LIMITS: dict[str, float] = {"scale-plus-0.1%": 0.1}
"""The largest strength of a fault that may pass this op's generator unseen, in the op's first dtype
under the envelope (harness.certificate): 1, the whole fault, where none is given; infinity: the
fault can't show in that dtype."""

Inputs = Mapping[str, Tensor]
Program = Callable[[SdpaCase, Inputs, Mode], dict[str, MidRad]]

Place = Literal["dtype", "compute"]
"""A format relative to the case: its own dtype, or the one it is computed in (float32)."""


@dataclass(frozen=True, kw_only=True)
class SdpaArithmetic:
    """Where a kernel rounds, from q and k to the output; formats are relative to the case.

    `scale_at`     query: q * scale, stored; both: q and k each times sqrt(scale), stored;
                   scores: the finished product times scale.
    `scale_format` the constant is rounded into it.
    `operands`     format of the stored q * scale (and k * scale).
    `qk`           accumulation of the scores.
    `scores`       dtype: the product and every operation on it (scale, softcap, ALiBi) are
                   stored in the case's dtype, a known rounding each; compute: they stay in
                   registers, and each rounds once at a point that a fused operation may skip.
    `softcap_divides`  score / softcap is a division (else a product with the reciprocal).
    `tanh_error`   of the softcap's tanh, in unit roundoffs of the compute format.
    `softmax`      the rest, for dtypes that are their own compute format.
    `softmax_low`  the rest for bfloat16 and float16; None: as `softmax`.
    `weights`      the softmax weights are stored in the case's dtype before they meet V.
    `shift`        s - max is stored in the case's dtype before exp.
    `flush_bf16`   bfloat16 factors are multiplied by instructions that read subnormals as zero and
                   flush results: VDPBF16PS, TDPBF16PS (Intel SDM), BFMMLA (Arm ARM, FPCR.EBF=0).
    """

    scale_at: Literal["query", "both", "scores"] = "scores"
    scale_format: Place = "compute"
    operands: Place = "compute"
    qk: Accumulate = field(default_factory=Accumulate)
    scores: Place = "compute"
    softcap_divides: bool = True
    tanh_error: float = 4.0
    softmax: SoftmaxPV = field(default_factory=SoftmaxPV)
    softmax_low: SoftmaxPV | None = None
    weights: bool = False
    shift: bool = False
    flush_bf16: bool = False

    def softmax_of(self, own: Format, compute: Format) -> SoftmaxPV:
        """The softmax of a case in `own` that is computed in `compute`."""
        low = own is not compute
        softmax = self.softmax_low if low and self.softmax_low is not None else self.softmax
        return replace(
            softmax,
            sum=_in(softmax.sum, compute),
            pv=multiplied(softmax.pv, own, compute, flush=self.flush_bf16),
            weights=own if low and self.weights else None,
            shift=own if low and self.shift else None,
        )


_LIBRARY_EXP = Exp(e0=1.5, flush=-103.0)
_VECTOR_SUM = Accumulate(order="simd8", exact_products=True, epilogue=0)

TORCH_MATH = SdpaArithmetic(
    scale_at="both",
    softmax=SoftmaxPV(exp=_LIBRARY_EXP, sum=_VECTOR_SUM),
)
"""torch's math backend: everything in float32, whatever the dtype."""

TORCH_FLASH = SdpaArithmetic(
    softmax=SoftmaxPV(exp=Exp(e0=42.0), sum=PLAIN_SUM, divisions=3, block=512),
    softmax_low=SoftmaxPV(
        exp=Exp(e0=130.0, e1=3.0, replica=cubic_exp, width=8),
        sum=PLAIN_SUM,
        rounded_at="exp",
        divisions=3,
        block=512,
    ),
    weights=True,
)
"""torch's CPU flash kernel: float32 scores; bf16 and fp16 weights by a cubic exp, rounded as
exp(s - running max), 512 keys a block. Vectors of 8 (AVX2): see `torch_flash`."""

MLX = SdpaArithmetic(
    scale_at="query",
    scale_format="dtype",
    operands="dtype",
    scores="dtype",
    softmax=SoftmaxPV(exp=Exp(e0=2.5, e1=0.9), sum=PLAIN_SUM),
    weights=True,
)
"""mx.fast.scaled_dot_product_attention as its fallback graph computes it: each result stored."""

HF_EAGER = SdpaArithmetic(
    scores="dtype",
    softmax=SoftmaxPV(exp=_LIBRARY_EXP, sum=_VECTOR_SUM),
    weights=True,
)
"""transformers' eager attention: each result stored, softmax in float32."""

HF_EAGER_SINKS = replace(HF_EAGER, shift=True)
"""gpt-oss in transformers: the sink is concatenated, the maximum subtracted in the dtype."""


TORCH_FLEX = SdpaArithmetic(softmax=TORCH_MATH.softmax, weights=True)
"""Eager FlexAttention: float32 scores and softmax, weights stored in the dtype before V."""


def torch_flash() -> SdpaArithmetic:
    """`TORCH_FLASH` on this CPU: float32 vectors of 8 (AVX2) or 16 (AVX512), its bf16 products."""
    low = TORCH_FLASH.softmax_low
    assert low is not None
    width = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    spec = replace(TORCH_FLASH, softmax_low=replace(low, exp=replace(low.exp, width=width)))
    return with_torch_matmul(spec)


def with_torch_matmul(spec: SdpaArithmetic) -> SdpaArithmetic:
    """`spec` of a kernel whose bfloat16 products are torch's own on this CPU.

    Where the CPU has bfloat16 products torch hands them to oneDNN, small ones excepted.
    """
    return replace(spec, flush_bf16=torch.ops.mkldnn._is_mkldnn_bf16_supported())


def program(spec: SdpaArithmetic) -> Program:
    """The program of a kernel with this arithmetic: (case, inputs, mode) -> {out, lse?}."""

    def run(case: SdpaCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        if not case.schedule:
            return call(case, inputs, mode)
        # Vectors and blocks of keys begin anew in every call.
        steps = [
            call(*_step(case, inputs, start, end, keys), mode) for start, end, keys in case.steps()
        ]
        return {name: cat([step[name] for step in steps], 2) for name in steps[0]}

    def call(case: SdpaCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        own, compute = formats_of(case.dtype)
        places: dict[Place, Format] = {"dtype": own, "compute": compute}
        q, k, v, visible = _grouped(case, inputs)
        scale = case.softmax_scale
        if spec.scale_at == "both":
            root = round_scalar(math.sqrt(scale), places[spec.scale_format])
            q = q.scale(root).round(places[spec.operands])
            k = k.scale(root).round(places[spec.operands])
        elif spec.scale_at == "query":
            q = q.scale(round_scalar(scale, places[spec.scale_format]))
            q = q.round(places[spec.operands])
        qk = multiplied(spec.qk, own, compute, flush=spec.flush_bf16)
        stored = own is not compute and spec.scores == "dtype"

        def step(scores: MidRad) -> MidRad:
            # Computed in float32 and then stored: two roundings, which differ from one near a tie.
            return scores.round(compute).round(own) if stored else scores.free(compute)

        independent = q.is_exact and k.is_exact
        scores = dot(q, k.mT, qk, mode)
        if stored:
            scores = scores.round(own)
        if spec.scale_at == "scores":
            scores = step(scores.scale(round_scalar(scale, places[spec.scale_format])))
        if case.softcap is not None:
            cap = round_scalar(case.softcap, own if stored else compute)
            if spec.softcap_divides:
                scores = divide_by(scores, cap)
            else:
                scores = scores.scale(round_scalar(1 / cap, own if stored else compute))
            scores = tanh(step(scores), spec.tanh_error, compute)
            scores = step((scores.round(own) if stored else scores).scale(cap))
        if case.alibi is not None:
            # slope * distance is one operation, the sum another; a fused one skips the first.
            scores = step(scores + step(_bias(case, inputs)))
        softmax = spec.softmax_of(own, compute)
        return _finish(case, inputs, scores, v, visible, softmax, mode, independent)

    return run


def by_request(run: Program) -> Program:
    """The program of a kernel that is called for each request, on its valid keys alone.

    Vectors and blocks begin with a request's own first key, and its last ones are the tail. All
    queries must be valid.
    """

    def each(case: SdpaCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        if case.kv_lens is None:
            return run(case, inputs, mode)
        parts = []
        for b, (first, keys) in enumerate(zip(case.first_keys, case.kv_lens, strict=True)):
            mine, own = slice(b, b + 1), slice(first, first + keys)
            one = replace(case, batch=1, kv_len=keys, kv_lens=None, side="right")
            given = {
                **inputs,
                "q": inputs["q"][mine],
                "k": inputs["k"][mine, :, own],
                "v": inputs["v"][mine, :, own],
                "visible": inputs["visible"][mine, ..., own],
            }
            parts.append(run(one, given, mode))
        return {name: cat([part[name] for part in parts], 0) for name in parts[0]}

    return each


def envelope(
    case: SdpaCase, inputs: Inputs, mode: Mode, accumulate: Accumulate | None = None
) -> dict[str, MidRad]:
    """Any kernel that computes in the case's dtype with float32 accumulators; rigorous.

    No rounding point is known. In the dtype T may be rounded: the scale constant and up to two
    scaled operands, the product, the scaled product, each softcap step, the slope of ALiBi, its
    product with the distance, the sum of that and the score, s - max, the weights, and one stored
    copy of the output before its own rounding. The exponential may be a fast one
    (1.1e-4 relative, torch's cubic) in a low precision, and 20 ulp of float32 otherwise.
    Bfloat16 subnormals may be read as zero, and results flushed: x86 and Arm have such products.
    With ALiBi a kernel may count the keys from another origin c than the query, which moves a whole
    row by slope * c: from the first key (BLOOM), or from the last (MPT). It then rounds a product
    and a sum that are as large as a = slope * span, where the distances may be small. In the
    compute format of unit u that is allowed, and is at most u a + u (|s| + a + u a). In a shorter
    T it isn't: u a is then no rounding but another bias (bfloat16, slope 1/2, key 300: half a
    logit), so that who stores slope * position in T is told so.

    Radii are those of det mode whatever `mode` says: unknown rounding is not random.

    `accumulate` replaces the float32 accumulator in any order, e.g. `directed=True` for tensor
    cores that truncate.
    """
    del mode
    own, compute = formats_of(case.dtype)
    accumulate = multiplied(accumulate or Accumulate(order="any"), own, compute, flush=True)
    q, k, v, visible = _grouped(case, inputs)
    scale = case.softmax_scale
    scores = dot(q, k.mT, accumulate, DET)
    # Two rounded operands: (1 + u)^2 - 1 of sum |q k|, and underflow of each against the other.
    products = q.mid.abs() @ k.mid.abs().mT
    crumbs = q.mid.abs().sum(-1, keepdim=True) + k.mid.abs().sum(-1).unsqueeze(-2)
    operand = (2 * own.u + own.u**2) * products
    underflow = own.tiny * crumbs * max(1.0, 1.0 / scale)
    scores = MidRad(scores.mid, scores.rad * (1 + 3 * own.u) + operand + underflow)
    # The constant, the product, the scaled product.
    scores = scores.scale(scale).free(own, 3)
    if case.softcap is not None:
        # The cap or its reciprocal as a constant, the quotient; tanh; the cap, the product.
        scores = divide_by(scores, case.softcap).free(own, 2)
        scores = tanh(scores, 4.0, compute).free(own, 1).scale(case.softcap).free(own, 2)
    if case.alibi is not None:
        # Counted from another origin; then: the slope and the product, the sum.
        span = max(
            case.kv_len, int(inputs["distance"].masked_fill(~inputs["visible"], 0).abs().max())
        )
        farthest = span * _slopes(case, inputs)
        moved = scores.mid.abs() + scores.rad + (2 + compute.u) * farthest
        scores = MidRad(scores.mid, scores.rad + compute.u * moved + compute.tiny)
        scores = (scores + _bias(case, inputs).free(own, 2)).free(own, 1)
    softmax = any_softmax(accumulate, own, compute)
    return _finish(case, inputs, scores, v, visible, softmax, DET, False, stored=own)


def any_softmax(accumulate: Accumulate, own: Format, compute: Format) -> SoftmaxPV:
    """What the envelope allows between scores and output: no rounding into `own` is known."""
    low = own is not compute
    return SoftmaxPV(
        exp=Exp(e0=1900.0, e1=2.0) if low else Exp(e0=64.0, e1=2.0),
        sum=replace(accumulate, exact_products=True),
        pv=accumulate,
        divisions=4,
        weights=own if low else None,
        rounding_known=False,
        shift=own if low else None,
        shift_known=False,
        block=16,
    )


def _step(
    case: SdpaCase, inputs: Inputs, start: int, end: int, keys: int
) -> tuple[SdpaCase, Inputs]:
    """One call of a schedule: queries start:end against the first `keys` keys."""
    call = {
        **inputs,
        "q": inputs["q"][:, :, start:end],
        "k": inputs["k"][:, :, :keys],
        "v": inputs["v"][:, :, :keys],
        "visible": inputs["visible"][:, :, start:end, :keys],
    }
    if case.alibi is not None:
        call["distance"] = inputs["distance"][:, :, start:end, :keys]
    return replace(case, q_len=end - start, kv_len=keys, schedule=()), call


def formats_of(dtype: str) -> tuple[Format, Format]:
    """(format of the dtype, format it is computed in)."""
    own = FORMATS[dtype]
    return own, own if own.precision > FP32.precision else FP32


def multiplied(accumulate: Accumulate, own: Format, compute: Format, *, flush: bool) -> Accumulate:
    """The accumulation of products of `own`; flush: bfloat16 subnormals may be lost."""
    if flush and own is BF16:
        accumulate = replace(accumulate, flush=True, subnormals_lost=own)
    return _in(accumulate, compute)


def _in(accumulate: Accumulate, compute: Format) -> Accumulate:
    """The same accumulation in float64 where the case is float64."""
    return replace(accumulate, format=FP64) if compute is FP64 else accumulate


def _grouped(case: SdpaCase, inputs: Inputs) -> tuple[MidRad, MidRad, MidRad, Tensor]:
    """q [B, Hkv, G Lq, D], k and v [B, Hkv, Lk, D], visible [B, 1, G Lq, Lk].

    The G query heads of one kv head become rows, so k and v are never repeated. Keys that no
    query of their request sees are zeroed: whatever poison stands there meets no arithmetic.
    """
    visible = inputs["visible"]
    group = case.heads // case.kv_heads
    q = inputs["q"].to(torch.float64)
    q = q.reshape(q.shape[0], case.kv_heads, group * q.shape[2], q.shape[3])
    k, v = inputs["k"].to(torch.float64), inputs["v"].to(torch.float64)
    unseen = ~visible.any(-2)
    if bool(unseen.any()):
        k, v = (x.masked_fill(unseen.unsqueeze(-1), 0.0) for x in (k, v))
    rows = visible if group == 1 else visible.repeat(1, 1, group, 1)
    return MidRad(q), MidRad(k), MidRad(v), rows


def _slopes(case: SdpaCase, inputs: Inputs) -> Tensor:
    """[1, Hkv, G Lq, 1], the rows of `_grouped`."""
    slopes = inputs["alibi"].to(torch.float64).reshape(1, case.kv_heads, -1, 1)
    return slopes.repeat_interleave(inputs["q"].shape[2], 2)


def _bias(case: SdpaCase, inputs: Inputs) -> MidRad:
    """ALiBi's -slope * distance [B, Hkv, G Lq, Lk]: 24 bits times an integer, float64 holds it."""
    distance = inputs["distance"].to(torch.float64)
    distance = distance.repeat(1, 1, case.heads // case.kv_heads, 1)
    return MidRad(-_slopes(case, inputs) * distance)


def _finish(
    case: SdpaCase,
    inputs: Inputs,
    scores: MidRad,
    v: MidRad,
    visible: Tensor,
    softmax: SoftmaxPV,
    mode: Mode,
    independent: bool,
    stored: Format | None = None,
) -> dict[str, MidRad]:
    """Mask, softmax and values; outputs in the case's own shape."""
    scores = scores.where(visible, -torch.inf)
    sink = None
    if case.sinks is not None:
        logits = inputs["sinks"].to(torch.float64).reshape(1, case.kv_heads, -1, 1)
        rows = scores.shape[-2] // logits.shape[2]
        sink = MidRad(logits.repeat_interleave(rows, 2))
    out = softmax_pv(scores, v, softmax, mode, sink, independent=independent).free(stored)
    shape = (case.batch, case.heads, case.q_len)
    dead = ~visible.any(-1, keepdim=True)
    if bool(dead.any()) and sink is not None:
        # Only the sink is left, whose value is 0: exactly zero, whatever the radii say.
        out = MidRad(out.mid.masked_fill(dead, 0.0), out.rad.masked_fill(dead, 0.0))
    elif bool(dead.any()) and stored is not None:
        out = MidRad(out.mid, out.rad.masked_fill(dead, 0.0))
    result = {"out": out.reshape(*shape, v.shape[-1])}
    if case.lse:
        lse = log_sum_exp(scores, softmax, mode, sink, independent=independent)
        result["lse"] = lse.reshape(*shape)
    return result
