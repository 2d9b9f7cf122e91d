"""mlx_lm's ropes: `rope_utils.initialize_rope` itself, and as its models build and scale it."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import deepseek_v3, laguna, llama, ministral3, rope_utils

from cases.yarn import DTYPES, FEATURES, Claims, YarnCase
from harness.programs.yarn import MLX, program
from harness.subject import Subject, Tensors
from references.yarn import probe_columns

SPAN = 2048
"""Tokens that one call of a dynamic rope may hold here, for q and k to meet the same base."""

Rope = Callable[..., mx.array]
Built = tuple[Rope, float]
"""A model's rope on the columns from `nope` on, and its softmax scale."""


def direct(case: YarnCase) -> Built:
    """initialize_rope with what the config says, and apply_yarn_mscale for latent attention."""
    config = case.config()
    written = dict(_dict(case, config))
    base = written.pop("rope_theta", config.get("rope_theta"))
    dims = case.rope.rotary_dim
    if case.proportional and case.partial is not None:
        written["partial_rotary_factor"] = case.partial
    rope = rope_utils.initialize_rope(
        dims, base, case.interleaved, written or None, case.max_positions
    )
    scale = case.head_dim**-0.5
    return rope, rope_utils.apply_yarn_mscale(scale, written) if case.nope else scale


def built(arguments: Mapping[str, Any], scale: float) -> Built:
    """initialize_rope with arguments made elsewhere."""
    return rope_utils.initialize_rope(**arguments), scale


def _dict(case: YarnCase, config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope[case.layer_type] if case.layer_type else rope


def _llama(case: YarnCase) -> Built:
    attention = llama.Attention(_arguments(llama.ModelArgs, case))
    return attention.rope, attention.scale


def _ministral3(case: YarnCase) -> Built:
    config = case.config()
    rope = config["rope_parameters"]
    rope.setdefault("llama_4_scaling_beta", 0.0)
    rope.setdefault("original_max_position_embeddings", case.max_positions)
    attention = ministral3.Attention(_arguments(ministral3.ModelArgs, case, **config))
    return attention.rope, attention.scale


def _laguna(case: YarnCase) -> Built:
    config = case.config()
    attention = laguna.Attention(_arguments(laguna.ModelArgs, case, num_hidden_layers=2), 0)
    assert config["layer_types"][0] == case.layer_type
    return attention.rope, attention.scale


def _deepseek_v3(case: YarnCase) -> Built:
    small = {"kv_lora_rank": 8, "q_lora_rank": None, "v_head_dim": 8}
    attention = deepseek_v3.DeepseekV3Attention(_arguments(deepseek_v3.ModelArgs, case, **small))
    return attention.rope, attention.scale


def _arguments(kind: Any, case: YarnCase, **more: Any) -> Any:
    """The model's arguments from the config.json, as mlx_lm's loader makes them."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8, "rms_norm_eps": 1e-6}
    return kind.from_dict({**sizes, **case.config(), **more})


def run(build: Callable[[YarnCase], Built]) -> Callable[[YarnCase, Tensors], Tensors]:
    """The answer of a rope that `build` makes of the case."""

    def answer(case: YarnCase, tensors: Tensors) -> Tensors:
        rope, scale = build(case)
        if case.dynamic:
            q, k = _by_request(case, rope, tensors["q"], tensors["k"])
        else:
            q = _turned(case, rope, tensors["q"], case.offsets)
            k = _turned(case, rope, tensors["k"], case.key_offsets)
        if case.temperature is not None:
            q = q * _growth(case).astype(q.dtype)
        out = {"logits": _logits(q, k, scale)}
        if case.frequencies:
            out["inv_freq"] = _frequencies(case, rope)
        if case.composed:
            probe = np.zeros((1, 1, 2, case.head_dim), np.float32)
            for token, column in enumerate(probe_columns(case.rope)):
                probe[0, 0, token, column] = 1
            ends = (_turned(case, rope, mx.array(probe[:, :, i : i + 1]), (0,)) for i in range(2))
            out["scale"] = mx.stack([_logits(x, x, scale)[0, 0, 0, 0] for x in ends])
        return out | ({"q": q, "k": k} if case.rotated else {})

    return answer


def _turned(case: YarnCase, rope: Rope, x: mx.array, offsets: tuple[int, ...]) -> mx.array:
    offset = offsets[0] if len(set(offsets)) == 1 else mx.array(offsets)
    part = rope(x[..., case.nope :], offset=offset)
    return mx.concatenate([x[..., : case.nope], part], -1) if case.nope else part


def _by_request(case: YarnCase, rope: Rope, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """Each request in calls of its own: DynamicNTKScalingRoPE takes one offset."""
    rows = [
        _together(case, rope, q[b : b + 1], k[b : b + 1], case.offsets[b], case.key_offsets[b])
        for b in range(case.batch)
    ]
    return mx.concatenate([row[0] for row in rows]), mx.concatenate([row[1] for row in rows])


def _together(
    case: YarnCase, rope: Rope, q: mx.array, k: mx.array, at_q: int, at_k: int
) -> tuple[mx.array, mx.array]:
    """q and k over the span that holds both, since each call picks a base by its own length."""
    start, stop = min(at_q, at_k), max(at_q + case.q_len, at_k + case.kv_len)
    turned = []
    for x, at in ((q, at_q), (k, at_k)):
        wide = mx.pad(x, [(0, 0), (0, 0), (at - start, stop - at - x.shape[2]), (0, 0)])
        wide = _turned(case, rope, wide, (start,))
        turned.append(wide[:, :, at - start : at - start + x.shape[2]])
    return turned[0], turned[1]


def _growth(case: YarnCase) -> mx.array:
    rope = case.rope
    offset = case.offsets[0] if len(set(case.offsets)) == 1 else mx.array(case.offsets)
    return ministral3._get_llama_4_attn_scale(
        case.q_len, offset, rope.temperature, int(rope.original_max)
    )


def _logits(q: mx.array, k: mx.array, scale: float) -> mx.array:
    k = mx.repeat(k.astype(mx.float32), q.shape[1] // k.shape[1], 1)
    return (q.astype(mx.float32) @ k.swapaxes(-1, -2)) * scale


def _frequencies(case: YarnCase, rope: Any) -> mx.array:
    """1 / the periods that the rope keeps, [batch, head_dim / 2]."""
    table = 1 / rope._freqs
    table = mx.pad(table, (0, case.head_dim // 2 - table.shape[0]))
    return mx.broadcast_to(table, (case.batch, table.shape[0]))


def _refusal(case: YarnCase) -> str | None:
    if case.rope_type in ("yarn", "llama3", "linear", "dynamic") and case.factor is None:
        return f"initialize_rope needs the factor of type {case.rope_type}"
    if case.lone_mscale:
        return "a lone mscale or mscale_all_dim counts, as in DeepSeek's own code"
    apart = max(abs(q - k) for q, k in zip(case.offsets, case.key_offsets, strict=True))
    if case.dynamic and apart >= SPAN:
        return "q and k are too far apart to meet in one call of a dynamic rope"
    if case.longrope and case.interleaved:
        return "SuScaledRoPE rotates halves"
    return None


def _subject(
    name: str, build: Callable[[YarnCase], Built], claims: Claims, *, only: bool = False
) -> Subject:
    """only: cases without a feature that the claims always have are refused, not just not drawn."""
    return Subject(
        name=f"mlx_lm.yarn.{name}",
        run=run(build),
        claims=claims,
        dtypes=DTYPES,
        runtime="mlx",
        lanes=("mps",),
        programs={"cpu": program(MLX)},
        refusal=lambda case: (claims.lacking(case) if only else None) or _refusal(case),
    )


_ALL = frozenset(FEATURES) - {"scattered", "temperature", "nulls", "original_at_top"}
_FLAT = _ALL - {"proportional", "partial", "interleaved", "nope", "nested", "frequencies"}
_YARN = {"factor", "original_max", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_MODEL = _FLAT - {"dynamic", "longrope", "short_factor", "long_factor", "truncate"}
_LONE = {"mscale", "mscale_all_dim"}
_SHARED = _ALL - _LONE - {"frequencies", "attention_factor", "truncate"}
SUBJECTS = (
    _subject("initialize_rope", direct, Claims(_SHARED - {"interleaved"})),
    _subject(
        "traditional",
        direct,
        Claims(
            _SHARED - {"dynamic", "longrope", "short_factor", "long_factor"},
            always=("interleaved",),
        ),
        only=True,
    ),
    _subject(
        "yarn_rope",
        direct,
        Claims(
            _YARN | {"composed", "rotated", "interleaved", "partial", "nope", "old_names"},
            always=("yarn", "frequencies"),
        ),
        only=True,
    ),
    _subject("llama", _llama, Claims((_MODEL | {"truncate"}) - _LONE, always=("old_names",))),
    _subject(
        "ministral3",
        _ministral3,
        Claims((_MODEL | {"temperature"}) - {"old_names", "attention_factor"}),
    ),
    _subject(
        "laguna", _laguna, Claims((_MODEL | {"partial"}) - _LONE, always=("nested",)), only=True
    ),
    _subject(
        "deepseek_v3",
        _deepseek_v3,
        Claims(
            _MODEL - {"rotated", "attention_factor"}, always=("nope", "interleaved", "old_names")
        ),
        only=True,
    ),
)
