"""Owns the meaning of a rope config: frequencies, rotation, and the composed logit scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
"""Rope types that have a meaning here."""

ALIASES = {"su": "longrope", "deepseek_yarn": "yarn", "telechat3-yarn": "yarn"}
"""Older or vendors' names of a rope type."""

DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "mistral4"})
"""model_types whose softmax scale carries mscale_all_dim, squared."""

INTERLEAVED = DEEPSEEK | {"llama4_text"}
"""model_types that rotate pairs (2i, 2i+1) when the config does not say otherwise."""

DEFAULT_THETA = {"gpt_oss": 150000.0}
"""rope_theta of model_types that have one of their own; 10000 elsewhere."""


def yarn(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    config: Mapping[str, Any],
    layer_type: str | None = None,
) -> Tensor:
    """Attention logits of unrotated q and k under a config.json, float64 `[B, H, Lq, Lk]`.

        t[b, i]          = 1 + beta ln(1 + floor(q_positions[b, i] / original_max))
        logits[b,h,i,j]  = softmax_scale * t[b, i] * <rotate(q[b,h,i]), rotate(k[b,g(h),j])>

    Shapes: q `[B, H, Lq, D]`, k `[B, Hkv, Lk, D]`, positions int64 `[B, Lq]` and `[B, Lk]`,
    g(h) = h // (H / Hkv). No mask: every pair.

    **Contract**

    - Engines put the magnitude of YaRN into the rotation, into the softmax scale, or into both, and
      under several names; only the logits, all factors together, must agree.
    - What a config means: `read`. Frequencies: `inv_freq`. Which columns, in which pairs: `rotate`.
      The composed scale, and where each engine puts it: `composed_scale`.
    - A request's length is its largest position in q and k, + 1; it alone decides between
      longrope's factor sets and on dynamic rope's base, for all of its tokens.
    - Positions need be neither consecutive nor sorted, and each request has its own.

    Raises:
        ValueError: as `read` does.
    """
    rope = read(config, layer_type)
    longest = torch.maximum(q_positions.amax(-1), k_positions.amax(-1)) + 1
    table = per_request(rope, longest.tolist())
    turned_q = rotate(q, angles(q_positions, table), rope)
    turned_k = rotate(k, angles(k_positions, table), rope)
    return logits(turned_q * temperature(q_positions, rope)[:, None, :, None], turned_k, rope)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """What a rope config means: nothing optional, nothing spelled in two ways.

    Lengths and positions in tokens; `start`, `rotary_dim`, `head_dim` in columns of q and k.
    `attention_factor` multiplies the rotated columns of q and of k, once each; `softmax_scale`
    multiplies every logit. `short` and `long` divide the frequencies (longrope).
    `temperature` is the llama4 beta, 0 for none.
    """

    kind: str
    base: float
    head_dim: int
    rotary_dim: int
    start: int
    interleaved: bool
    softmax_scale: float
    max_positions: int
    original_max: float
    factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    angles: int = 0
    temperature: float = 0.0

    @property
    def depends_on_length(self) -> bool:
        """Whether a request's length decides on its frequencies."""
        return self.kind in ("dynamic", "longrope")


def read(config: Mapping[str, Any], layer_type: str | None = None) -> Rope:
    """The meaning of a `config.json` (its text model's dict), of one layer type where they differ.

    **Contract** (transformers' meaning; where other engines differ, they say so or are wrong)

    - The rope dict is `rope_scaling` (the old name, which wins where both are given) or
      `rope_parameters`; with `layer_types` in the config it may be nested, one dict per type.
      None of them: plain rope.
    - Its type is `rope_type`, else `type`, else "default"; `su` is longrope.
    - A null is an absent field, but for `truncate`, whose null is refused: transformers takes it
      for False, others for True.
    - `rope_theta` and `partial_rotary_factor` stand in the dict or, in old files, beside it;
      `original_max_position_embeddings` beside it wins over the dict (Phi-3). Left out, it is
      `max_position_embeddings`, and an absent factor is max / original.
    - beta_fast is 32 and beta_slow 1 when absent or 0; `truncate` is True when absent.
    - **mscale.** g(f, m) = 0.1 m ln f + 1, 1 for f <= 1. What multiplies the rotated columns of q
      and of k is, in this order: `attention_factor` where it is given (the final value, 1.0
      included: sglang and vLLM have `attn_factor`, a multiplier of g(f, 1) instead);
      g(f, mscale) / g(f, mscale_all_dim) where both are given and not 0; g(f, 1).
      One of the two alone is nothing (mlx_lm counts mscale alone).
    - In the DeepSeek family (`DEEPSEEK`) the softmax scale is head_dim**-0.5 times
      g(f, mscale_all_dim)**2, on every column; elsewhere (Ministral 3, whose configs have
      mscale_all_dim too) it is head_dim**-0.5. head_dim is then qk_nope_head_dim +
      qk_rope_head_dim, and the last qk_rope_head_dim columns are rotated.
    - longrope multiplies by sqrt(1 + ln f / ln original), or `attention_factor`; its
      `short_mscale` and `long_mscale` (PhiMoE) are refused.
    - The other types multiply by 1.
    - llama4 query temperature: `llama_4_scaling_beta` in the rope dict (Ministral 3). Llama 4's
      own, on its layers without rope, counts pos + 1 and is not this.

    Raises:
        ValueError: an unknown rope type, or a field that is missing, contradictory or refused.
    """
    model = config.get("model_type") or ""
    rope = _rope_dict(config, layer_type)
    name = rope.get("rope_type") or rope.get("type") or "default"
    kind = ALIASES.get(name, name)
    if kind not in KINDS:
        raise ValueError(f"rope_type={name!r} is unknown; expected one of {', '.join(KINDS)}")
    for field in ("short_mscale", "long_mscale"):
        if rope.get(field) is not None:
            raise ValueError(f"{field}={rope[field]!r} has no meaning here; expected no such field")
    if "truncate" in rope and rope["truncate"] is None:
        raise ValueError("truncate=None is ambiguous; write true or false, or leave it out")

    heads = config.get("num_attention_heads")
    nope, rotated = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    if nope is not None and rotated is not None:
        head_dim, start, rotary_dim, spread = nope + rotated, nope, rotated, rotated
    else:
        head_dim = config.get("head_dim") or config["hidden_size"] // heads  # pyright: ignore
        partial = _first(rope, config, "partial_rotary_factor", 1.0)
        start, spread = 0, head_dim
        # Proportional rope spreads few angles over pairs of the whole head.
        rotary_dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim} must be even and at least 2")

    longest = config["max_position_embeddings"]
    original = _or(_first(config, rope, "original_max_position_embeddings", None), longest)
    factor = rope.get("factor")
    if factor is None:
        factor = longest / original if kind in ("yarn", "longrope") else 1.0
    angles = rotary_dim // 2
    if kind == "proportional":
        angles = int(_first(rope, config, "partial_rotary_factor", 1.0) * spread // 2)
    return Rope(
        kind=kind,
        base=_first(rope, config, "rope_theta", DEFAULT_THETA.get(model, 10000.0)),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        start=start,
        interleaved=_or(config.get("rope_interleave"), model in INTERLEAVED),
        softmax_scale=_softmax_scale(head_dim, model, kind, factor, rope),
        max_positions=longest,
        original_max=original,
        factor=factor,
        attention_factor=_attention_factor(kind, factor, original, rope),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
        low_freq_factor=_or(rope.get("low_freq_factor"), 1.0),
        high_freq_factor=_or(rope.get("high_freq_factor"), 4.0),
        short=_factors(rope, "short_factor", angles) if kind == "longrope" else (),
        long=_factors(rope, "long_factor", angles) if kind == "longrope" else (),
        angles=angles,
        temperature=_or(rope.get("llama_4_scaling_beta"), 0.0),
    )


def _rope_dict(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    types = set(config.get("layer_types") or ())
    nested = [name for name in rope if name in types]
    if not nested:
        return rope
    if layer_type not in nested:
        raise ValueError(
            f"layer_type={layer_type!r} has no rope here; expected one of {', '.join(nested)}"
        )
    return rope[layer_type] or {}


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _first(one: Mapping[str, Any], two: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    return _or(_or(one.get(name), two.get(name)), otherwise)


def _factors(rope: Mapping[str, Any], name: str, angles: int) -> tuple[float, ...]:
    given = rope.get(name) or ()
    if len(given) != angles:
        raise ValueError(
            f"{name} has {len(given)} numbers, expected one for each of {angles} pairs"
        )
    return tuple(float(x) for x in given)


def mscale(factor: float, weight: float = 1.0) -> float:
    """g(f, m) = 0.1 m ln f + 1, and 1 for f <= 1: YaRN's magnitude of q and k."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _attention_factor(kind: str, factor: float, original: float, rope: Mapping[str, Any]) -> float:
    given = rope.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return float(given)
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return mscale(factor, above) / mscale(factor, below)
    return mscale(factor)


def _softmax_scale(
    head_dim: int, model: str, kind: str, factor: float, rope: Mapping[str, Any]
) -> float:
    scale = head_dim**-0.5
    if model in DEEPSEEK and kind != "default" and (weight := rope.get("mscale_all_dim")):
        scale *= mscale(factor, weight) ** 2
    return scale


def correction_range(rope: Rope) -> tuple[float, float]:
    """YaRN's ramp: the pair indices where extrapolation ends and where interpolation is complete.

    The pair that turns n times within the original context is d ln(L0 / (2 pi n)) / (2 ln base),
    floored for beta_fast and ceiled for beta_slow if `truncate`, then clamped to [0, d - 1], where
    d is the rotary dimension (not its half).
    """

    def pair(turns: float) -> float:
        return (
            rope.rotary_dim
            * math.log(rope.original_max / (turns * 2 * math.pi))
            / (2 * math.log(rope.base))
        )

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    return low, high + (0.001 if low == high else 0.0)


def inv_freq(rope: Rope, length: int) -> Tensor:
    """Radians per position of each rotated pair, float64 `[rotary_dim / 2]`.

        plain          w_i = base**(-2i/d)
        linear         w_i / factor
        dynamic        w_i of base * (f L/M - (f - 1))**(d/(d-2)),  L = max(length, M)
        yarn           w_i (1 - r_i) + w_i / f * r_i,  r_i = clamp((i - low)/(high - low), 0, 1)
        llama3         with t = L0 w_i / (2 pi) turns: w_i for t > high, w_i / f for t < low,
                       between them (1 - s) w_i / f + s w_i, s = (t - low)/(high - low)
        longrope       w_i / long_i if length > L0 else w_i / short_i
        proportional   base**(-2i/head_dim) / f for the first pairs, 0 for the others

    d = rotary_dim, f = factor, M = max_positions, L0 = original_max.

    **Contract**

    - `length` is the number of tokens of the request that the pair belongs to, cached ones
      included: its largest position + 1. It is a property of the request, not of the call (in a
      chunked prefill it grows, and cached keys keep the rotation they were stored with), nor of
      the batch (transformers takes the longest request of the batch) or of the allocation (vLLM).
      Only dynamic and longrope look at it.
    - longrope is long from L0 + 1 tokens on: at L0 it is short.
    - dynamic is plain rope up to M tokens.
    - The linear factor may as well divide positions.
    - yarn's factor stands outside the power: 1 / (f base**(2i/d)).

    Raises:
        ValueError: dynamic rope on two columns (its exponent d/(d-2) has no value).
    """
    d = rope.rotary_dim
    pair = torch.arange(0, d, 2, dtype=torch.float64) / d
    base = rope.base
    if rope.kind == "dynamic":
        if d <= 2:
            raise ValueError(f"rotary_dim={d} must be at least 4 for dynamic rope")
        grown = max(length, rope.max_positions)
        stretch = rope.factor * grown / rope.max_positions - (rope.factor - 1)
        base = base * stretch ** (d / (d - 2))
    plain = base**-pair
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "yarn":
            low, high = correction_range(rope)
            ramp = ((torch.arange(d // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
            return plain * (1 - ramp) + plain / rope.factor * ramp
        case "llama3":
            turns = rope.original_max * plain / (2 * math.pi)
            low, high = rope.low_freq_factor, rope.high_freq_factor
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            return (1 - smooth) * plain / rope.factor + smooth * plain
        case "longrope":
            chosen = rope.long if length > rope.original_max else rope.short
            return plain / torch.tensor(chosen, dtype=torch.float64)
        case "proportional":
            plain = rope.base ** -(torch.arange(0, d, 2, dtype=torch.float64) / rope.head_dim)
            plain[rope.angles :] = 0.0
            return plain / rope.factor
    return plain


def rotate(x: Tensor, angles: Tensor, rope: Rope) -> Tensor:
    """`x` with its rotary columns turned by `angles` and multiplied by the attention factor.

        (a, b) -> m (a cos t - b sin t,  b cos t + a sin t)

    Shapes: x `[B, H, L, head_dim]`, angles `[B, L, rotary_dim / 2]` in radians; result as x.

    **Contract**

    - neox pairs columns i and i + rotary_dim/2 of the rotary part, interleaved 2i and 2i + 1; the
      order of the columns stays (DeepSeek V3 in transformers de-interleaves q and k: another
      order, the same logits).
    - The rotary part is the first rotary_dim columns, or the last ones in the DeepSeek family; the
      others pass through, without the attention factor.
    - Counter-clockwise: logits depend on position of q minus position of k.
    """
    x = x.double()
    stop = rope.start + rope.rotary_dim
    part = x[..., rope.start : stop]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    if rope.interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = part.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    part = torch.stack(turned, -1).flatten(-2) if rope.interleaved else torch.cat(turned, -1)
    return torch.cat((x[..., : rope.start], part * rope.attention_factor, x[..., stop:]), -1)


def temperature(positions: Tensor, rope: Rope) -> Tensor:
    """1 + beta ln(1 + floor(pos / original_max)), float64, elementwise: a factor on whole queries.

    Each request counts its own positions. It is 1 below original_max.
    """
    return 1 + rope.temperature * torch.log1p(torch.floor(positions.double() / rope.original_max))


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """position * frequency, float64: `[B, L]` and `[B, n]` to `[B, L, n]`."""
    return positions.double()[..., None] * frequencies[:, None]


def logits(q: Tensor, k: Tensor, rope: Rope) -> Tensor:
    """softmax_scale * <q, k> of rotated q `[B, H, Lq, D]` and k `[B, Hkv, Lk, D]`, every pair.

    Float64 `[B, H, Lq, Lk]`; kv head h // (H / Hkv) belongs to query head h. No mask.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return rope.softmax_scale * (q.double() @ k.double().mT)


def composed_scale(rope: Rope) -> tuple[float, float]:
    """The logit of two equal unit vectors at position 0: the whole scale, wherever it is put.

    Along the first rotated column, and along the outermost column on the other side, which passes
    through unless the whole head is rotated:

        rotated  softmax_scale * attention_factor**2
        passed   softmax_scale

    **Where each engine puts it.** transformers: cos and sin times `attention_scaling`, and
    `scaling` in the attention. mlx_lm: the input of the rotation times `mscale` (YarnRoPE) or
    `_scale` (SuScaledRoPE), and `scale`. sglang, vLLM: the cos/sin cache times `mscale` =
    yarn_get_mscale(factor) * attn_factor, and `scaling`. Only the product is compared.
    """
    rotated = rope.softmax_scale * rope.attention_factor**2
    return rotated, rope.softmax_scale if rope.head_dim > rope.rotary_dim else rotated


def probe_columns(rope: Rope) -> tuple[int, int]:
    """The two columns that `composed_scale` speaks of."""
    return rope.start, 0 if rope.start else rope.head_dim - 1


def per_request(rope: Rope, lengths: Sequence[int]) -> Tensor:
    """`inv_freq` of every request, float64 `[batch, rotary_dim / 2]`."""
    return torch.stack([inv_freq(rope, length) for length in lengths])
