"""transformers' rotary embeddings, as its models' own attention applies them.

A model's attention module runs with its projections replaced by q and k themselves; what it then
hands to the attention function (rotated q and k, `scaling`) is the answer.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.deepseek_v2 import configuration_deepseek_v2, modeling_deepseek_v2
from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3
from transformers.models.gpt_oss import configuration_gpt_oss, modeling_gpt_oss
from transformers.models.laguna import configuration_laguna, modeling_laguna
from transformers.models.llama import configuration_llama, modeling_llama
from transformers.models.llama4 import configuration_llama4, modeling_llama4
from transformers.models.ministral3 import configuration_ministral3, modeling_ministral3
from transformers.models.phi3 import configuration_phi3, modeling_phi3

from cases.yarn import DTYPES, FEATURES, TYPES, Claims, YarnCase
from harness.programs.yarn import TRANSFORMERS, TRANSFORMERS_COMPLEX, YarnArithmetic, program
from harness.subject import Subject, Tensors
from references.hf.given import Given
from references.yarn import probe_columns

_CAPTURE = "parity_capture"
"""Name under which the attention function that keeps its arguments is registered."""


class _Captured(Exception):
    """Carries what the attention function was called with; ends the forward pass there."""

    def __init__(self, query: Tensor, key: Tensor, scaling: float) -> None:
        super().__init__("the attention function was reached")
        self.query, self.key, self.scaling = query, key, scaling


def _capture(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> None:
    del module, value, mask
    raise _Captured(query, key, kwargs["scaling"])


AttentionInterface.register(_CAPTURE, _capture)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """How one model is asked: its classes, and what its config needs that no rope config has."""

    config: type
    attention: Callable[..., nn.Module]
    rotary: Callable[..., nn.Module]
    extra: dict[str, Any] = field(default_factory=dict)
    layer_type: str | None = None
    positions: bool = False


def _rotated(
    model: _Model, case: YarnCase, q: Tensor, k: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, float, Tensor]:
    """q and k of equal length as the attention function gets them, its scaling, and inv_freq."""
    config = _config(model, case, q.shape[1])
    with _quiet(), torch.device("meta"):
        attention = model.attention(config)
    with _quiet():
        rotary = model.rotary(config)
    _feed(attention, case, q, k)
    hidden = q.new_zeros(q.shape[0], q.shape[2], 1)
    layer = {} if model.layer_type is None else {"layer_type": model.layer_type}
    embeddings = rotary(hidden, positions, **layer)
    more: dict[str, Any] = {"position_ids": positions} if model.positions else {}
    try:
        attention(hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, **more)
    except _Captured as call:
        prefix = "" if model.layer_type is None else f"{model.layer_type}_"
        return call.query, call.key, call.scaling, getattr(rotary, f"{prefix}inv_freq")
    raise RuntimeError("the model's attention did not reach the attention function")


def _config(model: _Model, case: YarnCase, heads: int) -> Any:
    written = {**case.config(), **model.extra}
    del written["model_type"]
    if not case.nope:
        written["head_dim"] = case.head_dim
    if "layer_types" in written:
        written["num_hidden_layers"] = len(written["layer_types"])
    else:
        written["num_hidden_layers"] = 1
    if model.positions:  # the config class has a rope of its own; without a beta there is none
        rope = written.get("rope_scaling") or written.get("rope_parameters") or {}
        rope.setdefault("llama_4_scaling_beta", 0.0)
        rope.setdefault("original_max_position_embeddings", case.rope.original_max)
        written["rope_scaling" if case.old_names else "rope_parameters"] = rope
    written["num_attention_heads"] = heads
    with _quiet():
        return model.config(attn_implementation=_CAPTURE, **written)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice on unusual configs: they are the point."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _feed(attention: Any, case: YarnCase, q: Tensor, k: Tensor) -> None:
    """Replace the projections (and norms of q and k) by the inputs themselves."""
    rows = q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)
    value = torch.zeros_like(rows[1])
    if case.nope:
        latent = k.new_zeros(k.shape[0], k.shape[2], attention.kv_lora_rank)
        attention.q_proj = Given(rows[0])
        attention.kv_a_proj_with_mqa = Given(torch.cat((latent, rows[1][..., case.nope :]), -1))
        attention.kv_a_layernorm = nn.Identity()
        up = torch.cat((k[..., : case.nope], k.new_zeros(*k.shape[:-1], attention.v_head_dim)), -1)
        up = up.expand(-1, q.shape[1], -1, -1).transpose(1, 2)
        attention.kv_b_proj = Given(up.flatten(2))
        return
    if hasattr(attention, "qkv_proj"):
        attention.qkv_proj = Given(torch.cat((*rows, value), -1))
    else:
        for name, x in zip(("q_proj", "k_proj", "v_proj"), (*rows, value), strict=True):
            setattr(attention, name, Given(x))
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            setattr(attention, name, nn.Identity())


def _run(model: _Model) -> Callable[[YarnCase, Tensors], Tensors]:
    def run(case: YarnCase, tensors: Tensors) -> Tensors:
        q, k = tensors["q"], tensors["k"]
        # One forward over the queries and the keys together, as in a prefill of all of them.
        wide_q = torch.cat((q, q.new_zeros(*q.shape[:2], k.shape[2], q.shape[3])), 2)
        wide_k = torch.cat((k.new_zeros(*k.shape[:2], q.shape[2], k.shape[3]), k), 2)
        positions = torch.cat((tensors["q_positions"], tensors["k_positions"]), 1)
        query, key, scaling, table = _rotated(model, case, wide_q, wide_k, positions)
        query, key = query[:, :, : case.q_len], key[:, :, case.q_len :]
        out = {"logits": _logits(query, key, scaling)}
        if case.frequencies:
            table = nn.functional.pad(table, (0, case.head_dim // 2 - table.shape[-1]))
            out["inv_freq"] = table.expand(case.batch, -1).contiguous()
        if case.composed:
            out["scale"] = _scale(model, case, q.device)
        return out | ({"q": query, "k": key} if case.rotated else {})

    return run


def _logits(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query.float() @ key.float().mT) * scaling


def _scale(model: _Model, case: YarnCase, device: torch.device) -> Tensor:
    """The composed scale, measured: logits of unit vectors at position 0, in float32."""
    probe = torch.zeros(1, 1, 2, case.head_dim, device=device)
    for token, column in enumerate(probe_columns(case.rope)):
        probe[0, 0, token, column] = 1.0
    q = probe.expand(1, case.heads, 2, case.head_dim)
    k = probe.expand(1, case.kv_heads, 2, case.head_dim)
    positions = torch.zeros(1, 2, dtype=torch.int64, device=device)
    query, key, scaling, _ = _rotated(model, case, q, k, positions)
    return _logits(query, key, scaling)[0, 0].diagonal().contiguous()


_MLA = {"q_lora_rank": None, "kv_lora_rank": 2, "v_head_dim": 1}
_MODELS = {
    "llama": _Model(
        config=configuration_llama.LlamaConfig,
        attention=lambda config: modeling_llama.LlamaAttention(config, 0),
        rotary=modeling_llama.LlamaRotaryEmbedding,
    ),
    "gpt_oss": _Model(
        config=configuration_gpt_oss.GptOssConfig,
        attention=lambda config: modeling_gpt_oss.GptOssAttention(config, 0),
        rotary=modeling_gpt_oss.GptOssRotaryEmbedding,
    ),
    "phi3": _Model(
        config=configuration_phi3.Phi3Config,
        attention=lambda config: modeling_phi3.Phi3Attention(config, 0),
        rotary=modeling_phi3.Phi3RotaryEmbedding,
        extra={"pad_token_id": 0},
    ),
    "ministral3": _Model(
        config=configuration_ministral3.Ministral3Config,
        attention=lambda config: modeling_ministral3.Ministral3Attention(config, 0),
        rotary=modeling_ministral3.Ministral3RotaryEmbedding,
        positions=True,
    ),
    "laguna": _Model(
        config=configuration_laguna.LagunaConfig,
        attention=lambda config: modeling_laguna.LagunaAttention(
            config, 0, config.num_attention_heads
        ),
        rotary=modeling_laguna.LagunaRotaryEmbedding,
        layer_type="full_attention",
    ),
    "llama4": _Model(
        config=configuration_llama4.Llama4TextConfig,
        attention=lambda config: modeling_llama4.Llama4TextAttention(config, 0),
        rotary=modeling_llama4.Llama4TextRotaryEmbedding,
        extra={"use_qk_norm": False},
    ),
    "deepseek_v2": _Model(
        config=configuration_deepseek_v2.DeepseekV2Config,
        attention=lambda config: modeling_deepseek_v2.DeepseekV2Attention(config, 0),
        rotary=modeling_deepseek_v2.DeepseekV2RotaryEmbedding,
        extra=_MLA,
    ),
    "deepseek_v3": _Model(
        config=configuration_deepseek_v3.DeepseekV3Config,
        attention=lambda config: modeling_deepseek_v3.DeepseekV3Attention(config, 0),
        rotary=modeling_deepseek_v3.DeepseekV3RotaryEmbedding,
        extra=_MLA,
    ),
}

_PLAIN = frozenset(FEATURES) - {
    "proportional", "temperature", "partial", "interleaved", "nope", "nested"
}  # fmt: skip
"""What a model without partial rotary, MLA or temperature supports."""


_REQUIRED = {
    "yarn": ("factor",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _incomplete(case: YarnCase) -> str | None:
    """What the config's own check misses, rather than take the default."""
    for name in _REQUIRED.get(case.rope_type, ()):
        if getattr(case, name) is None:
            return f"a config of type {case.rope_type} without {name} is rejected"
    return None


def _gpt_oss(case: YarnCase) -> str | None:
    if case.old_names and case.rope_type == "default":
        return "GptOssConfig without a rope dict has a YaRN of its own"
    return None


def _one_length(case: YarnCase) -> str | None:
    """Shown where no model of its own stands in the way: see known.toml."""
    return "the longest request decides for the batch, as in llama" if case.mixed_lengths else None


def _laguna(case: YarnCase) -> str | None:
    if case.type_key == "type":
        return "LagunaConfig reads no `type`"
    if case.yarn and case.original_max is None:
        return "LagunaConfig of type yarn without original_max is rejected"
    return _one_length(case)


def _subject(
    model: str,
    claims: Claims,
    refusal: Callable[[YarnCase], str | None] = lambda case: None,
    spec: YarnArithmetic = TRANSFORMERS,
) -> Subject:
    return Subject(
        name=f"transformers.yarn.{model}",
        run=_run(_MODELS[model]),
        claims=claims,
        dtypes=DTYPES,
        lanes=("cpu", "mps", "cuda"),
        programs={"cpu": program(spec)},
        refusal=lambda case: claims.lacking(case) or _incomplete(case) or refusal(case),
    )


_LATENT = _PLAIN - {"rotated"}
SUBJECTS = (
    _subject("llama", Claims(_PLAIN)),
    _subject("gpt_oss", Claims(_PLAIN), _gpt_oss),
    _subject(
        "phi3",
        Claims(
            (_PLAIN | {"partial"}) - (set(TYPES) - {"longrope"}),
            always=("original_at_top", "longrope"),
        ),
        _one_length,
    ),
    _subject("ministral3", Claims((_PLAIN | {"temperature"}) - {"original_at_top"})),
    _subject("laguna", Claims(_PLAIN | {"partial"}, always=("nested",)), _laguna),
    _subject("llama4", Claims(_PLAIN, always=("interleaved",)), _one_length, TRANSFORMERS_COMPLEX),
    _subject(
        "deepseek_v2",
        Claims(_LATENT, always=("nope", "interleaved")),
        _one_length,
        TRANSFORMERS_COMPLEX,
    ),
    _subject("deepseek_v3", Claims(_LATENT | {"interleaved"}, always=("nope",)), _one_length),
)
