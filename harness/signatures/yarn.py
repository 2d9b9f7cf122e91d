"""The call of a person's own rope: q and k rotated, and the softmax scale that goes with them."""

from collections.abc import Callable
from typing import Any

import torch

from cases.yarn import FEATURES, TYPES, Claims, YarnCase
from harness.runtimes import Runtime
from harness.signatures import Parameter
from harness.subject import Tensors
from references.yarn import probe_columns

_CONFIG = tuple(name for name in FEATURES if name not in ("frequencies", "scattered"))
PARAMETERS = {
    "q": Parameter(meaning="[batch, heads, q_len, head_dim]", needed=True),
    "k": Parameter(meaning="[batch, kv_heads, kv_len, head_dim]", needed=True),
    "q_positions": Parameter(meaning="int64 [batch, q_len]", needed=True),
    "k_positions": Parameter(meaning="int64 [batch, kv_len]", needed=True),
    "config": Parameter(
        meaning="the model's config.json as a dict, in place of all below", features=_CONFIG
    ),
    "layer_type": Parameter(meaning="the layer type whose rope dict counts, or None"),
    "base": Parameter(meaning="rope_theta"),
    "factor": Parameter(
        meaning="a function that takes it without `config` is a YaRN rope", features=("factor",)
    ),
    "original_max": Parameter(
        meaning="original_max_position_embeddings", features=("original_max",)
    ),
    "beta_fast": Parameter(meaning="else 32 is meant", features=("beta_fast",)),
    "beta_slow": Parameter(meaning="else 1 is meant", features=("beta_slow",)),
    "truncate": Parameter(
        meaning="whether the ramp's bounds are rounded to pairs", features=("truncate",)
    ),
    "attention_factor": Parameter(
        meaning="what multiplies q and k, all told; else 0.1 ln(factor) + 1 is meant",
        features=("attention_factor", "mscale", "mscale_all_dim"),
    ),
    "rotary_dim": Parameter(meaning="columns that are rotated", features=("partial",)),
    "interleaved": Parameter(
        meaning="bool: pairs (2i, 2i+1) instead of (i, i + half)", features=("interleaved",)
    ),
}
OUTPUTS = ("q", "k", "scale")
FREE = ("scattered",)
RETURNS = "(q, k) rotated, of their dtype; or (q, k, softmax scale), else 1/sqrt(head_dim) is meant"
_ALWAYS_ASKED = frozenset({"composed", "rotated"})


def arguments(case: YarnCase, t: Tensors) -> dict[str, Any]:
    rope = case.rope
    return {
        **{name: t[name] for name in ("q", "k", "q_positions", "k_positions")},
        "config": case.config(),
        "layer_type": case.layer_type,
        "base": rope.base,
        "factor": rope.factor,
        "original_max": rope.original_max,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
        "attention_factor": rope.attention_factor,
        "rotary_dim": rope.rotary_dim,
        "interleaved": rope.interleaved,
    }


def calling(
    function: Callable[..., Any], names: tuple[str, ...], runtime: Runtime, device: str
) -> Callable[[YarnCase, Tensors], Tensors]:
    """The subject's call: what must agree are the logits and the composed scale."""

    def turned(case: YarnCase, tensors: Tensors) -> tuple[Any, Any, float]:
        given = arguments(case, tensors)
        q, k, *scale = function(**{name: given[name] for name in names})
        return q, k, float(scale[0]) if scale else case.head_dim**-0.5

    def logits(case: YarnCase, tensors: Tensors) -> tuple[torch.Tensor, Any, Any]:
        q, k, scale = turned(case, tensors)
        q_, k_ = runtime.fetch(q).float(), runtime.fetch(k).float()
        k_ = k_.repeat_interleave(q_.shape[1] // k_.shape[1], 1)
        return q_ @ k_.mT * scale, q, k

    def run(case: YarnCase, tensors: Tensors) -> Tensors:
        found, q, k = logits(case, tensors)
        out = {"logits": runtime.send(found, device)}
        if case.composed:
            probe = torch.zeros(1, 1, 2, case.head_dim)
            for token, column in enumerate(probe_columns(case.rope)):
                probe[0, 0, token, column] = 1.0
            at = torch.zeros(1, 2, dtype=torch.int64)
            asked = {"q": probe, "k": probe, "q_positions": at, "k_positions": at}
            sent = {name: runtime.send(x, device) for name, x in asked.items()}
            scale = logits(case, sent)[0][0, 0].diagonal().contiguous()
            out["scale"] = runtime.send(scale, device)
        return out | ({"q": q, "k": k} if case.rotated else {})

    return run


def claimed(features: frozenset[str]) -> frozenset[str]:
    """Without a config a function that takes `factor` is a YaRN rope, else it is a plain one."""
    if features & set(TYPES):
        return features
    if "factor" in features:
        return Claims(features | _ALWAYS_ASKED | {"yarn"}, always=("yarn",))
    return features | _ALWAYS_ASKED


def refusal(case: YarnCase, names: frozenset[str], claims: frozenset[str]) -> str | None:
    del names
    return claims.lacking(case) if isinstance(claims, Claims) else None
