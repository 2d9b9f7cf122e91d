"""Rope configs understood once: read a config.json, rotate with plain torch, or hand the meaning to
vLLM, sglang or mlx-lm in the words each of them has for it. Imports torch alone.

    rope = read(json.load(open("config.json")))
    q, k = Rotary(rope)(q, k, q_positions, k_positions)       # plain torch
    hints = to_sglang(rope)                                   # get_rope(**hints.arguments)

What engines disagree on is where YaRN's magnitude goes and what it is called, so a translation
always says it: `magnitude` on q and on k, `softmax_scale`, and their product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SCALED_BY_MSCALE = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "mistral4"}
)
"""model_types whose attention multiplies its softmax scale by g(factor, mscale_all_dim)**2."""

PLAINLY_SCALED = frozenset(
    {
        "exaone4", "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "laguna", "llama",
        "llama4_text", "ministral", "ministral3", "mistral", "mixtral", "olmo2", "olmo3", "phi",
        "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    }
)  # fmt: skip
"""model_types whose softmax scale is head_dim**-0.5 whatever the rope says."""

PAIRS = SCALED_BY_MSCALE | {"glm", "glm4", "llama4_text"}
"""model_types that rotate neighbouring columns."""

OWN_THETA = {"gpt_oss": 150000.0}

_EVERY = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
    "original_max_position_embeddings", "max_position_embeddings", "attention_factor",
    "llama_4_scaling_beta",
}  # fmt: skip
_OF_KIND = {
    "default": set[str](),
    "linear": set[str](),
    "dynamic": set[str](),
    "proportional": set[str](),
    "yarn": {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"low_freq_factor", "high_freq_factor"},
    "longrope": {"short_factor", "long_factor"},
}
_ALIASES = {"su": "longrope", "deepseek_yarn": "yarn", "telechat3-yarn": "yarn"}


class RopeError(ValueError):
    """A config, or a translation, that this module will not guess at; the message says why."""


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One rope, all defaults resolved.

    head_dim: columns of q and k; `rotary_dim` of them turn, from column `first` on.
    magnitude: factor of the rotated columns of q, and of k. softmax_scale: of every logit.
    beta: of the llama4 query temperature, 0 for none. Lengths in tokens.
    """

    kind: str
    theta: float
    head_dim: int
    rotary_dim: int
    first: int = 0
    pairs: bool = False
    max_positions: int
    original: int
    factor: float = 1.0
    magnitude: float = 1.0
    softmax_scale: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low: float = 1.0
    high: float = 4.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    turning: int
    beta: float = 0.0

    @property
    def composed_scale(self) -> float:
        """What multiplies the product of rotated columns: softmax_scale * magnitude**2."""
        return self.softmax_scale * self.magnitude**2


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A rope in the words of one engine.

    call: the function that takes `arguments`. softmax_scale: to be given to the attention, which
    must add nothing to it. magnitude: what the engine makes of `arguments`, on q and on k each.
    where: in which of its variables the engine keeps the magnitude. beta: the query temperature
    that the caller applies, with `original` tokens per step; 0 for none.
    """

    engine: str
    call: str
    arguments: Mapping[str, Any] = field(hash=False)
    softmax_scale: float
    magnitude: float
    where: str
    beta: float
    original: int

    @property
    def composed_scale(self) -> float:
        return self.softmax_scale * self.magnitude**2


def magnitude_of(factor: float, weight: float = 1.0) -> float:
    """0.1 * weight * ln(factor) + 1, and 1 where the factor extends nothing."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def read(config: Mapping[str, Any], layer_type: str | None = None) -> RopeSpec:
    """The rope of a config.json (its text model's dict), in transformers' meaning of it.

    Both spellings: `rope_scaling` with `rope_theta` beside it, or `rope_parameters`, nested per
    layer type or not. A null is an absent field.

    Raises:
        RopeError: a field, a rope type or a family that this module does not know; it never
            ignores one.
    """
    model = config.get("model_type")
    rope = _dict(config, layer_type)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    kind = _ALIASES.get(kind, kind)
    if kind not in _OF_KIND:
        raise RopeError(f"rope_type={kind!r} is not known; known: {', '.join(_OF_KIND)}")
    known = _EVERY | _OF_KIND[kind]
    others = set().union(*_OF_KIND.values())
    for name, value in rope.items():
        if name not in known | others and value is not None:
            raise RopeError(
                f"{name}={value!r} is not known in a {kind} rope; known: {', '.join(sorted(known))}"
            )
    if kind == "yarn" and "truncate" in rope and rope["truncate"] is None:
        raise RopeError("truncate=null: transformers reads false, others true; write one of them")

    def get(name: str, otherwise: Any) -> Any:
        value = rope.get(name)
        value = config.get(name) if value is None else value
        return otherwise if value is None else value

    longest = int(config["max_position_embeddings"])
    original = config.get("original_max_position_embeddings")
    original = original or rope.get("original_max_position_embeddings") or longest
    factor = rope.get("factor")
    if factor is None:
        factor = longest / original if kind in ("yarn", "longrope") else 1.0
    head_dim, first, rotary_dim, turning = _columns(config, kind, get("partial_rotary_factor", 1.0))
    weight = rope.get("mscale_all_dim") if kind == "yarn" else None
    if weight and model not in SCALED_BY_MSCALE | PLAINLY_SCALED:
        raise RopeError(
            f"model_type={model!r} with mscale_all_dim={weight}: whether its softmax scale carries "
            "it is not known; add the family to SCALED_BY_MSCALE or PLAINLY_SCALED"
        )
    softmax = magnitude_of(factor, weight) ** 2 if weight and model in SCALED_BY_MSCALE else 1.0
    pairs = config.get("rope_interleave")
    return RopeSpec(
        kind=kind,
        theta=float(get("rope_theta", OWN_THETA.get(str(model), 10000.0))),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        first=first,
        pairs=model in PAIRS if pairs is None else bool(pairs),
        max_positions=longest,
        original=original,
        factor=float(factor),
        magnitude=_magnitude(kind, float(factor), original, rope),
        softmax_scale=head_dim**-0.5 * softmax,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        low=float(rope.get("low_freq_factor") or 1),
        high=float(rope.get("high_freq_factor") or 4),
        short=_divisors(rope, kind, "short_factor", turning),
        long=_divisors(rope, kind, "long_factor", turning),
        turning=turning,
        beta=float(rope.get("llama_4_scaling_beta") or 0),
    )


def _dict(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = {name for name in rope if isinstance(rope[name], Mapping)}
    if not nested:
        return rope
    if layer_type not in nested:
        raise RopeError(
            f"layer_type={layer_type!r}: this config has a rope for each of "
            f"{', '.join(sorted(nested))}; name one"
        )
    return rope[layer_type]


def _columns(config: Mapping[str, Any], kind: str, partial: float) -> tuple[int, int, int, int]:
    """(columns of a head, first rotated one, rotated ones, pairs that turn)."""
    if config.get("qk_rope_head_dim"):
        first, rotary = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
        return first + rotary, first, rotary, rotary // 2
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if kind == "proportional":  # few frequencies, pairs of the whole head
        return head, 0, head, int(partial * head // 2)
    rotary = int(head * partial)
    if rotary < 2 or rotary % 2:
        raise RopeError(f"partial_rotary_factor={partial} of {head} columns: not a number of pairs")
    return head, 0, rotary, rotary // 2


def _magnitude(kind: str, factor: float, original: int, rope: Mapping[str, Any]) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return magnitude_of(factor, above) / magnitude_of(factor, below)
    return magnitude_of(factor)


def _divisors(rope: Mapping[str, Any], kind: str, name: str, pairs: int) -> tuple[float, ...]:
    if kind != "longrope":
        return ()
    given = tuple(float(x) for x in rope.get(name) or ())
    if len(given) != pairs:
        raise RopeError(f"{name} has {len(given)} numbers for {pairs} pairs; expected one each")
    return given


def ramp_bounds(rope: RopeSpec) -> tuple[float, float]:
    """Pair indices between which YaRN goes from keeping a frequency to dividing it."""
    half_turn = rope.original / (2 * math.pi)
    low, high = (
        rope.rotary_dim * math.log(half_turn / turns) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return low, high if high != low else high + 0.001


def frequencies(rope: RopeSpec, length: int) -> Tensor:
    """Radians per token of every rotated pair, float64 `[rotary_dim / 2]` on the CPU.

    length: tokens of the request, which decides for longrope and dynamic alone.
    """
    width, theta = rope.rotary_dim, rope.theta
    steps = torch.arange(0, width, 2, dtype=torch.float64)
    if rope.kind == "proportional":
        plain = theta ** (-steps / rope.head_dim) / rope.factor
        plain[rope.turning :] = 0
        return plain
    if rope.kind == "dynamic":
        if width == 2:
            raise RopeError("dynamic rope needs at least 4 rotated columns, got 2")
        ratio = max(length, rope.max_positions) / rope.max_positions
        theta *= (rope.factor * ratio - rope.factor + 1) ** (width / (width - 2))
    plain = theta ** (-steps / width)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        chosen = rope.long if length > rope.original else rope.short
        return plain / torch.tensor(chosen, dtype=torch.float64)
    if rope.kind == "yarn":
        low, high = ramp_bounds(rope)
        divided = ((steps / 2 - low) / (high - low)).clamp(0, 1)
        return torch.lerp(plain, plain / rope.factor, divided)
    if rope.kind == "llama3":
        turns = plain * (rope.original / (2 * math.pi))
        kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
        return torch.lerp(plain / rope.factor, plain, kept)
    return plain


class Rotary:
    """A rope in plain torch: angles in float64, the rotation in float32, one rounding at the end.

    Holds no state between calls: what a request gets depends on its own positions alone.
    """

    def __init__(self, rope: RopeSpec) -> None:
        self.rope = rope

    def __call__(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q `[B, H, Lq, D]` and k `[B, Hkv, Lk, D]` rotated, in their own dtype.

        Positions `[B, L]`, integers. The magnitude and the query temperature are applied; the
        logits are `rope.softmax_scale` times the products of what is returned.
        """
        lengths = (torch.maximum(q_positions.amax(-1), k_positions.amax(-1)) + 1).tolist()
        table = self.table(lengths).to(q.device)
        growth = None
        if self.rope.beta:
            growth = torch.floor(q_positions.double() / self.rope.original)
            growth = (1 + self.rope.beta * torch.log1p(growth)).float()[:, None, :, None]
        return self._turn(q, q_positions, table, growth), self._turn(k, k_positions, table, None)

    def table(self, lengths: list[int]) -> Tensor:
        """Frequencies of requests with so many tokens, float64 `[B, rotary_dim / 2]`, CPU."""
        if self.rope.kind in ("dynamic", "longrope"):
            return torch.stack([frequencies(self.rope, length) for length in lengths])
        return frequencies(self.rope, 0).expand(len(lengths), -1)

    def _turn(self, x: Tensor, positions: Tensor, table: Tensor, growth: Tensor | None) -> Tensor:
        rope = self.rope
        angle = (positions.double()[..., None] * table[:, None])[:, None]
        cos, sin = ((f(angle) * rope.magnitude).float() for f in (torch.cos, torch.sin))
        wide, end = x.float(), rope.first + rope.rotary_dim
        part = wide[..., rope.first : end]
        if rope.pairs:
            a, b = part[..., 0::2], part[..., 1::2]
        else:
            a, b = part.chunk(2, -1)
        turned = a * cos - b * sin, b * cos + a * sin
        part = torch.stack(turned, -1).flatten(-2) if rope.pairs else torch.cat(turned, -1)
        out = torch.cat((wide[..., : rope.first], part, wide[..., end:]), -1)
        return (out if growth is None else out * growth).to(x.dtype)


def to_sglang(rope: RopeSpec) -> Translation:
    """Arguments of `sglang.srt.layers.rotary_embedding.get_rope`.

    Its yarn multiplies cos and sin by yarn_get_mscale_simple(factor) * attn_factor, or by a ratio
    where mscale and mscale_all_dim are both given: so those two are left out, and attn_factor is
    the magnitude over what the factor implies.

    Raises:
        RopeError: a rope that sglang has not, or means otherwise.
    """
    _same_for_every_length(rope, "sglang")
    scaling = _shared(rope, "sglang")
    if rope.kind == "yarn":
        scaling["attn_factor"] = rope.magnitude / magnitude_of(rope.factor)
        scaling["truncate"] = rope.truncate
    arguments = {
        "head_size": rope.head_dim - rope.first,
        "rotary_dim": rope.rotary_dim,
        "max_position": rope.max_positions,
        "base": rope.theta,
        "is_neox_style": not rope.pairs,
        "rope_scaling": scaling if rope.kind != "default" else None,
    }
    return _translation(
        rope,
        "sglang",
        "sglang.srt.layers.rotary_embedding.get_rope",
        arguments,
        "the cos/sin cache, times mscale = yarn_get_mscale_simple(factor) * attn_factor",
        magnitude_of(rope.factor) * scaling["attn_factor"] if rope.kind == "yarn" else 1.0,
    )


def to_vllm(rope: RopeSpec) -> Translation:
    """Arguments of `vllm.model_executor.layers.rotary_embedding.get_rope`.

    Its yarn multiplies cos and sin by attention_factor, where that is given.

    Raises:
        RopeError: a rope that vLLM has not, or means otherwise.
    """
    _same_for_every_length(rope, "vLLM")
    parameters = {"rope_theta": rope.theta, **_shared(rope, "vLLM")}
    if rope.kind == "yarn":
        parameters["attention_factor"] = rope.magnitude
        parameters["truncate"] = rope.truncate
    head_size = rope.head_dim - rope.first
    parameters["partial_rotary_factor"] = rope.rotary_dim / head_size
    arguments = {
        "head_size": head_size,
        "max_position": rope.max_positions,
        "is_neox_style": not rope.pairs,
        "rope_parameters": parameters,
    }
    return _translation(
        rope,
        "vllm",
        "vllm.model_executor.layers.rotary_embedding.get_rope",
        arguments,
        "the cos/sin cache, times mscale = attention_factor",
        parameters["attention_factor"] if rope.kind == "yarn" else 1.0,
    )


def to_mlx_lm(rope: RopeSpec, length: int | None = None) -> Translation:
    """Arguments of `mlx_lm.models.rope_utils.initialize_rope`.

    Its yarn takes no attention_factor; the magnitude is 0.1 * mscale * ln(factor) + 1 where
    mscale_all_dim is 0, so mscale is chosen to give it. It always truncates. Its longrope takes
    long_factor at every length, and sqrt(1 + ln(max / original) / ln(original)): with `length`, the
    factors of a request of so many tokens stand there, and a max that gives the magnitude.

    Raises:
        RopeError: a rope that mlx-lm has not, or means otherwise.
    """
    scaling = _shared(rope, "mlx-lm")
    longest = float(rope.max_positions)
    magnitude = rope.magnitude
    if rope.kind == "yarn":
        bounds = ramp_bounds(rope)
        if not rope.truncate and any(x != int(x) for x in bounds):
            raise RopeError(f"truncate=false: mlx-lm rounds the ramp's bounds {bounds} to pairs")
        if rope.factor > 1:
            scaling["mscale"] = (magnitude - 1) / (0.1 * math.log(rope.factor))
            magnitude = magnitude_of(rope.factor, scaling["mscale"])
        elif magnitude != 1:
            raise RopeError(f"magnitude={magnitude} with factor=1: mlx-lm has 1 there")
        scaling["mscale_all_dim"] = 0
    if rope.kind == "longrope":
        if length is None:
            raise RopeError(
                "longrope: mlx-lm takes long_factor at every length; give the request's `length`"
            )
        if magnitude < 1:
            raise RopeError(f"magnitude={magnitude} below 1: mlx-lm's longrope has none")
        chosen = list(rope.long if length > rope.original else rope.short)
        scaling |= {"short_factor": chosen, "long_factor": chosen}
        longest = rope.original ** (magnitude * magnitude)
    if rope.kind == "proportional":
        scaling["partial_rotary_factor"] = 2 * rope.turning / rope.head_dim
    arguments = {
        "dims": rope.rotary_dim,
        "base": rope.theta,
        "traditional": rope.pairs,
        "scaling_config": scaling,
        "max_position_embeddings": longest,
    }
    return _translation(
        rope,
        "mlx_lm",
        "mlx_lm.models.rope_utils.initialize_rope",
        arguments,
        "the input of the rotation, times `mscale` (YarnRoPE) or `_scale` (SuScaledRoPE)",
        magnitude,
    )


def to_torch(rope: RopeSpec) -> Translation:
    """Arguments of `Rotary`."""
    return _translation(
        rope, "torch", f"{__name__}.Rotary", {"rope": rope}, "cos and sin", rope.magnitude
    )


def _shared(rope: RopeSpec, engine: str) -> dict[str, Any]:
    """The part of a rope dict that every engine spells alike."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind == "proportional" and engine != "mlx-lm":
        raise RopeError(f"proportional rope has no translation to {engine}'s get_rope")
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3", "longrope"):
        scaling["original_max_position_embeddings"] = rope.original
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    return scaling


def _same_for_every_length(rope: RopeSpec, engine: str) -> None:
    if rope.kind == "dynamic":
        raise RopeError(f"dynamic rope: {engine} has one base for all lengths, not the request's")
    if rope.kind == "longrope":
        raise RopeError(
            f"longrope: {engine} chooses the factors by the length it allocates or by the batch, "
            "not by the request"
        )


def _translation(
    rope: RopeSpec,
    engine: str,
    call: str,
    arguments: Mapping[str, Any],
    where: str,
    magnitude: float,
) -> Translation:
    return Translation(
        engine=engine,
        call=call,
        arguments=arguments,
        softmax_scale=rope.softmax_scale,
        magnitude=magnitude,
        where=where,
        beta=rope.beta,
        original=rope.original,
    )
