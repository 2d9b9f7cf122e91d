"""The declared arithmetic of rotary embeddings, and the envelope of any of them.

Radii are those of det mode whatever the mode: the error of a frequency is one and the same in
every position, head and request, so roundings are not independent, and with rotary dimensions of
a few dozen the linear bound costs little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from cases.case import Inputs
from cases.yarn import YarnCase
from harness.arithmetic.dot import Accumulate, dot
from harness.arithmetic.elementwise import cosine_sine
from harness.arithmetic.formats import FORMATS, FP32, FP64, Format, round_scalar
from harness.arithmetic.midrad import EPS64, MidRad, cat, exact, stack
from harness.arithmetic.mode import DET, Mode
from references.yarn import Rope, correction_range

EXACT = False
"""Whether the op has no rounding at all, so that its envelope is a single answer."""
LIMITS: dict[str, float] = {"base-off-by-0.01%": 0.1, "position-plus-one": 1e-3}
"""The largest strength of a fault that may pass this op's generator unseen, in the op's first dtype
under the envelope (harness.certificate): 1, the whole fault, where none is given; infinity: the
fault can't show in that dtype."""

Program = Callable[[YarnCase, Inputs, Mode], dict[str, MidRad]]

Place = Literal["dtype", "compute"]
"""A format relative to the case: its own dtype, or float32."""


@dataclass(frozen=True, kw_only=True)
class YarnArithmetic:
    """Where a rotary embedding rounds, from the config to the rotated q and k.

    `power_error`  of base**(-2i/d), in unit roundoffs of float32.
    `log_error`    the same per unit of |ln frequency|: the exponent is a rounded float32 too.
    `exact_table`  frequencies are computed in float64.
    `period`       what is stored is the period 1/w, and the kernel takes the reciprocal.
    `angle`        float32 roundings of position * frequency; 0: frequencies, angles, cos and sin
                   are float64, and cos and sin are rounded once, after the magnitude.
    `trig_error`   of cos and sin, in unit roundoffs of float32.
    `magnitude`    table: cos and sin are multiplied by the attention factor, in float32;
                   input: q and k are, before the rotation, constant and product in the dtype.
    `table`        format cos and sin are stored in.
    `products`     dtype: every product and sum of the rotation is stored in the dtype; compute:
                   float32, with one rounding at the end.
    `cut`          rotated q and k are stored by cutting off what the dtype has no bits for: less
                   than one unit in the last place, 2u, on one side, instead of u on both.
    `growth`       dtype: the query temperature, and its product with the stored q, are stored in
                   the dtype; compute: it is one more float32 product before q is stored.
    """

    power_error: float = 4.0
    log_error: float = 1.0
    exact_table: bool = False
    period: bool = False
    angle: int = 1
    trig_error: float = 2.0
    magnitude: Literal["table", "input"] = "table"
    table: Place = "dtype"
    products: Place = "dtype"
    growth: Place = "dtype"
    cut: bool = False


TRANSFORMERS = YarnArithmetic()
"""transformers' rotate_half family: float32 tables stored in the dtype, products in the dtype."""

VLLM = YarnArithmetic(products="compute")
"""vLLM's CPU kernel: transformers' tables, stored in the dtype and read as float32; products and
sums in float32, with one rounding at the end."""

VLLM_CUT = replace(VLLM, cut=True)
"""The same, in bfloat16 on a CPU without AVX512_BF16: see `harness.engines.vllm.yarn`."""

TRANSFORMERS_COMPLEX = YarnArithmetic(table="compute", products="compute")
"""transformers' complex multiplication (DeepSeek V2, Llama 4): float32 throughout."""

MLX = YarnArithmetic(log_error=4.0, period=True, angle=2, magnitude="input")
"""mx.fast.rope's fallback graph, and mlx_lm's RoPE classes on it: MLX's CPU backend. Frequencies
are exp(-i ln(base) / h), so the exponent's roundings (ln, quotient, product) count; the graph
multiplies positions by `scale` first."""

MLX_TABLE = replace(MLX, power_error=3.0, log_error=0.0)
"""mx.fast.rope with `freqs`, periods rounded to float32, of which it takes the reciprocal."""

NATIVE = YarnArithmetic(
    exact_table=True, angle=0, table="compute", products="compute", growth="compute"
)
"""The native torch rotary: float64 angles, a float32 rotation."""


def program(spec: YarnArithmetic) -> Program:
    """The program of a rotary embedding with this arithmetic."""

    def run(case: YarnCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        del mode
        own = FORMATS[case.dtype]
        table = frequencies(spec, case, inputs)
        low = own is not FP32

        def store(x: MidRad, place: Place) -> MidRad:
            return x.round(own) if low and place == "dtype" else x.free(FP32)

        def turned(name: str) -> MidRad:
            x, rope = exact(inputs[name]), case.rope
            start, stop = rope.start, rope.start + rope.rotary_dim
            part = x[..., start:stop]
            if spec.magnitude == "input" and rope.attention_factor != 1:
                part = store(part.scale(round_scalar(rope.attention_factor, own)), "dtype")
            cos, sin = (
                store(c, spec.table) if low else c for c in _table(spec, case, inputs, name, table)
            )
            a, b = _halves(part, rope)
            first = store(
                store(a * cos, spec.products) - store(b * sin, spec.products), spec.products
            )
            second = store(
                store(b * cos, spec.products) + store(a * sin, spec.products), spec.products
            )
            return cat((x[..., :start], _joined(first, second, rope), x[..., stop:]))

        q, k = turned("q"), turned("k")
        if spec.cut:
            q, k = (_cut(x, own, case.rope) for x in (q, k))
        if case.temperature is not None:
            growth = _growth(case, inputs, 6.0)
            if low and spec.growth == "dtype":
                q = (q.round(own) * growth.round(own)).round(own)
            else:
                q = (q * growth.round(FP32)).free(FP32)
        if low and not spec.cut:
            q, k = q.round(own), k.round(own)
        return _outputs(case, q, k, table.round(FP32))

    return run


_ANY = YarnArithmetic(power_error=12.0, log_error=4.0, angle=3, trig_error=8.0, period=True)
"""Errors of the envelope: float32 powers by exp2(log2), reciprocals, rescaled positions."""


def envelope(case: YarnCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
    """Any kernel that computes tables and angles in float32 and rotates in the case's dtype.

    No rounding point is known. In the dtype may be rounded: q and k times the magnitude, cos and
    sin, each product, the sum, one stored copy; the temperature and its product.
    """
    del mode
    own, rope = FORMATS[case.dtype], case.rope
    table = frequencies(_ANY, case, inputs)

    def turned(name: str) -> MidRad:
        x = exact(inputs[name])
        start, stop = rope.start, rope.start + rope.rotary_dim
        cos, sin = cosine_sine(_angles(_ANY, case, inputs, name, table), _ANY.trig_error, FP32)
        cos, sin = (c.free(own)[:, None] for c in (cos, sin))
        # The magnitude and its product with q, or with the table: two more in either place.
        part = x[..., start:stop].scale(rope.attention_factor)
        part = part.free(own, 2) if rope.attention_factor != 1 else part
        a, b = _halves(part, rope)
        first = ((a * cos).free(own) - (b * sin).free(own)).free(own, 2)
        second = ((b * cos).free(own) + (a * sin).free(own)).free(own, 2)
        return cat((x[..., :start], _joined(first, second, rope), x[..., stop:]))

    q, k = turned("q"), turned("k")
    if case.temperature is not None:
        q = (q * _growth(case, inputs, 12.0).free(own)).free(own)
    return _outputs(case, q, k, table)


def frequencies(spec: YarnArithmetic, case: YarnCase, inputs: Inputs) -> MidRad:
    """Inverse frequencies [batch, rotary_dim / 2] as the subject has them, in float32."""
    table = case.table(inputs)
    if spec.exact_table:
        exactly = MidRad(table, table.abs() * (64 * EPS64))
        return exactly if spec.angle == 0 else exactly.round(FP32)
    rows = [relative_error(spec, case.rope, length) for length in case.lengths]
    rad = table.abs() * torch.stack(rows) * FP32.u
    return MidRad(table, torch.where(table == 0, 0.0, rad + FP32.tiny)).round(FP32)


def relative_error(spec: YarnArithmetic, rope: Rope, length: int) -> Tensor:
    """Relative error of each frequency [rotary_dim / 2] in unit roundoffs of float32.

    E = power_error + log_error |ln w| is that of the plain frequency w = base**(-2i/d): the power,
    a reciprocal, and the rounding of its exponent, which enters times ln base. Then

        linear, longrope, proportional   one product and one quotient: E + 3
        dynamic   the stretch f L/M - (f-1) loses its digits by cancellation: relative error
                  A = (3 f L/M + 2 f)/stretch; to the power d/(d-2), times base, +4; the base's
                  error enters times 2i/d
        yarn      ramp r = (i - low)/(high - low): absolute error delta of two rounded
                  differences and a quotient, 2 more for 1 - r and back; it enters with the span
                  between the two frequencies, the products with the result
        llama3    the same with s = (t - low)/(high - low), t = L0 w/(2 pi) of error E + 3
    """
    d = rope.rotary_dim
    base = rope.base
    pair = torch.arange(0, d, 2, dtype=torch.float64) / d
    more = torch.zeros(())
    if rope.kind == "dynamic":
        grown = max(length, rope.max_positions) / rope.max_positions
        stretch = rope.factor * grown - (rope.factor - 1)
        power = d / (d - 2)
        base *= stretch**power
        more = pair * ((3 * rope.factor * grown + 2 * rope.factor) / stretch * power + 4)
    if rope.kind == "proportional":
        pair = torch.arange(0, d, 2, dtype=torch.float64) / rope.head_dim
    plain = base**-pair
    error = spec.power_error + spec.log_error * plain.log().abs() + more
    match rope.kind:
        case "yarn":
            low, high = correction_range(rope)
            index = torch.arange(d // 2, dtype=torch.float64)
            raw, span = (index - low) / (high - low), abs(high - low)
            delta = (abs(low) + 2 * (index - low).abs() + abs(high)) / span + 4
            weight = raw.clamp(0, 1)
            between = _within(raw, delta)
            result = plain * (1 - weight) + plain / rope.factor * weight
            spread = plain * (1 + 1 / rope.factor) * between * delta
            return error + 6 + spread / result
        case "llama3":
            low, high = rope.low_freq_factor, rope.high_freq_factor
            turns = rope.original_max * plain / (2 * math.pi)
            raw = (turns - low) / (high - low)
            delta = (turns * (error + 3) + (turns - low).abs() + low + high) / (high - low) + 4
            smooth = raw.clamp(0, 1)
            result = (1 - smooth) * plain / rope.factor + smooth * plain
            spread = plain * (1 + 1 / rope.factor) * _within(raw, delta) * delta
            return error + 6 + spread / result
        case "linear" | "longrope" | "proportional":
            return error + 3
    return error


def _within(raw: Tensor, delta: Tensor) -> Tensor:
    """1 where a ramp of absolute error `delta` roundoffs may be strictly between 0 and 1."""
    slack = delta * FP32.u
    return ((raw > -slack) & (raw < 1 + slack)).double()


def _table(
    spec: YarnArithmetic, case: YarnCase, inputs: Inputs, name: str, table: MidRad
) -> tuple[MidRad, MidRad]:
    """cos and sin in float32 [batch, 1, len, rotary_dim / 2], times a magnitude that is there."""
    angles = _angles(spec, case, inputs, name, table)
    cos, sin = cosine_sine(angles, *((4.0, FP64) if spec.angle == 0 else (spec.trig_error, FP32)))
    if spec.angle == 0:
        magnitude = case.rope.attention_factor
        cos, sin = (c.scale(magnitude).free(FP64).round(FP32) for c in (cos, sin))
    elif spec.magnitude == "table":
        magnitude = round_scalar(case.rope.attention_factor, FP32)
        cos, sin = (c.scale(magnitude).free(FP32) for c in (cos, sin))
    return cos[:, None], sin[:, None]


def _angles(
    spec: YarnArithmetic, case: YarnCase, inputs: Inputs, name: str, table: MidRad
) -> MidRad:
    """position * frequency, [batch, len, rotary_dim / 2]; positions below 2**24 are exact."""
    if f"{name}_angles" in inputs:
        return exact(inputs[f"{name}_angles"])
    positions = exact(inputs[f"{name}_positions"].double()[..., None])
    product = positions * table[:, None]
    if spec.angle == 0:
        return product.free(FP64)
    if spec.angle == 1 and not (spec.period or case.rope.kind == "linear"):
        return product.round(FP32)
    return product.free(FP32, spec.angle)


def _cut(x: MidRad, own: Format, rope: Rope) -> MidRad:
    """x with its rotated columns cut to the format; what passes through is of the format."""
    start, stop = rope.start, rope.start + rope.rotary_dim
    return cat((x[..., :start], x[..., start:stop].free(own, 2), x[..., stop:]))


def _halves(part: MidRad, rope: Rope) -> tuple[MidRad, MidRad]:
    if rope.interleaved:
        return part[..., 0::2], part[..., 1::2]
    return part[..., : rope.rotary_dim // 2], part[..., rope.rotary_dim // 2 :]


def _joined(first: MidRad, second: MidRad, rope: Rope) -> MidRad:
    if not rope.interleaved:
        return cat((first, second))
    both = stack((first, second), -1)
    return both.reshape(*first.shape[:-1], rope.rotary_dim)


def _growth(case: YarnCase, inputs: Inputs, error: float) -> MidRad:
    """The query temperature [batch, 1, q_len, 1], with `error` roundoffs of float32."""
    growth = case.growth(inputs)[:, None, :, None]
    return MidRad(growth, growth * error * FP32.u)


def _outputs(case: YarnCase, q: MidRad, k: MidRad, table: MidRad) -> dict[str, MidRad]:
    """The outputs that the case asks for; the logits are a float32 product of what is stored."""
    rope = case.rope
    group = case.heads // case.kv_heads
    wide = MidRad(k.mid.repeat_interleave(group, 1), k.rad.repeat_interleave(group, 1))
    products = Accumulate(order="any", exact_products=FORMATS[case.dtype] is not FP32)
    logits = dot(q, wide.mT, products, DET).scale(rope.softmax_scale).free(FP32, 2)
    out = {"logits": logits}
    if case.frequencies:
        out["inv_freq"] = MidRad(case.padded(table.mid), case.padded(table.rad))
    if case.composed:
        # Magnitude, its square, the softmax scale: constants and products of a probe in float32.
        out["scale"] = exact(case.expected_scale()).free(FP32, 8)
    return out | ({"q": q, "k": k} if case.rotated else {})


PLACEMENT = {
    "transformers": (
        "rotation: cos and sin times `attention_scaling` = attention_factor (final), else g(mscale)"
        " / g(mscale_all_dim) with both given, else g(1); attention: `scaling` = head_dim**-0.5,"
        " in the DeepSeek family times g(mscale_all_dim)**2 (yarn_apply_mscale)"
    ),
    "mlx_lm": (
        "rotation: its input times `mscale` = g(mscale or 1) / g(mscale_all_dim or 0) (YarnRoPE),"
        " `_scale` = sqrt(1 + ln(max/original) / ln(original)) (SuScaledRoPE); attention: `scale`,"
        " in the DeepSeek family times g(mscale_all_dim)**2 (apply_yarn_mscale); attention_factor"
        " and truncate are not read"
    ),
    "mlx": "mx.fast.rope has no magnitude: the caller multiplies q and k, or the scale",
    "native": (
        "rotation: cos and sin times `RopeSpec.magnitude`; attention: `RopeSpec.softmax_scale`;"
        " `composed_scale` is their product"
    ),
    "sglang": (
        "rotation: cos and sin times `mscale` = yarn_get_mscale_simple(factor) * `attn_factor`, or"
        " the ratio of mscale and mscale_all_dim where both are given: attn_factor is a multiplier,"
        " so attention_factor / yarn_get_mscale_simple(factor); attention: `scaling`, in the"
        " DeepSeek family times g(mscale_all_dim)**2"
    ),
    "vllm": (
        "rotation: cos and sin times `mscale` = `attention_factor` (final), else the ratio of"
        " mscale and mscale_all_dim where both are given, else yarn_get_mscale(factor);"
        " deepseek_yarn knows the ratio alone; attention: `scaling`, in the DeepSeek family times"
        " yarn_get_mscale(factor, mscale_all_dim)**2"
    ),
}
"""Where each engine puts YaRN's magnitude, and what it calls it; g(m) = 0.1 m ln(factor) + 1."""
