"""Owns the witness for rope configs: ROPE_INIT_FUNCTIONS and models' own rotation, in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    LagunaConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    Phi3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.laguna import modeling_laguna as laguna
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.ministral3 import modeling_ministral3 as ministral3
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.utils import logging


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model's own pieces: config class, rotary embedding, its application, and attention.

    The attention is built on the meta device, for its `scaling` alone.
    """

    config: Any
    rotary: Any
    apply: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
    attention: Callable[[Any], Any]
    layer_type: str | None = None


def _halves(module: Any) -> Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]:
    return lambda q, k, table: module.apply_rotary_pos_emb(q, k, *table)


def _deepseek_v3(q: Tensor, k: Tensor, table: Any) -> tuple[Tensor, Tensor]:
    return deepseek_v3.apply_rotary_pos_emb_interleave(q, k, *table)


def _llama4(q: Tensor, k: Tensor, table: Any) -> tuple[Tensor, Tensor]:
    q, k = llama4.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), table)
    return q.transpose(1, 2), k.transpose(1, 2)


MODELS = {
    "llama": Model(
        config=LlamaConfig,
        rotary=llama.LlamaRotaryEmbedding,
        apply=_halves(llama),
        attention=lambda config: llama.LlamaAttention(config, 0),
    ),
    "gpt_oss": Model(
        config=GptOssConfig,
        rotary=gpt_oss.GptOssRotaryEmbedding,
        apply=_halves(gpt_oss),
        attention=lambda config: gpt_oss.GptOssAttention(config, 0),
    ),
    "phi3": Model(
        config=Phi3Config,
        rotary=phi3.Phi3RotaryEmbedding,
        apply=_halves(phi3),
        attention=lambda config: phi3.Phi3Attention(config, 0),
    ),
    "ministral3": Model(
        config=Ministral3Config,
        rotary=ministral3.Ministral3RotaryEmbedding,
        apply=_halves(ministral3),
        attention=lambda config: ministral3.Ministral3Attention(config, 0),
    ),
    "laguna": Model(
        config=LagunaConfig,
        rotary=laguna.LagunaRotaryEmbedding,
        apply=_halves(laguna),
        attention=lambda config: laguna.LagunaAttention(config, 0, config.num_attention_heads),
        layer_type="full_attention",
    ),
    "llama4_text": Model(
        config=Llama4TextConfig,
        rotary=llama4.Llama4TextRotaryEmbedding,
        apply=_llama4,
        attention=lambda config: llama4.Llama4TextAttention(config, 0),
    ),
    "deepseek_v2": Model(
        config=DeepseekV2Config,
        rotary=deepseek_v2.DeepseekV2RotaryEmbedding,
        apply=deepseek_v2.apply_rotary_emb,
        attention=lambda config: deepseek_v2.DeepseekV2Attention(config, 0),
    ),
    "deepseek_v3": Model(
        config=DeepseekV3Config,
        rotary=deepseek_v3.DeepseekV3RotaryEmbedding,
        apply=_deepseek_v3,
        attention=lambda config: deepseek_v3.DeepseekV3Attention(config, 0),
    ),
}
"""model_type -> its pieces. Interleaved: llama4_text and both DeepSeeks."""


def parameters(
    model: str, config: Mapping[str, Any], length: int | None = None
) -> tuple[Tensor, float]:
    """Inverse frequencies `[n]`, float64, and the attention factor, of a config.json's dict.

    length: tokens of the request, for the types that look at it.

    **Where transformers means something else**

    - `truncate` is read beside the nested rope dicts, never inside them: with one dict per layer
      type (Laguna) `truncate: false` has no effect.
    - A null `truncate` is False; so is 0. A missing factor is a KeyError for yarn, a null one is
      max / original.
    - The longest request of a batch decides for all (`dynamic`, `longrope`).
    - Configs without a rope dict: GptOssConfig and Ministral3Config have a YaRN of their own.
    - Llama ignores `partial_rotary_factor` for plain rope and takes it for the other types.
    """
    piece = MODELS[model]
    made = configuration(model, config)
    rope = made.rope_parameters
    nested = {} if piece.layer_type is None else {"layer_type": piece.layer_type}
    kind = (rope if piece.layer_type is None else rope[piece.layer_type])["rope_type"]
    with Float64():
        if kind == "default":
            return piece.rotary.compute_default_rope_parameters(made, **nested)
        return ROPE_INIT_FUNCTIONS[kind](made, None, seq_len=length, **nested)


def rotated(
    model: str, config: Mapping[str, Any], q: Tensor, k: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, float]:
    """q and k `[B, H, L, rotary columns]` as the model rotates them, float64, and its scaling.

    positions: int64 `[B, L]`, of q and of k alike. Columns that pass through are the model's
    business where it rotates the first ones (`partial`), the caller's in the DeepSeek family.
    Ministral 3's query temperature is applied.
    """
    piece = MODELS[model]
    made = configuration(model, config)
    with quiet(), torch.device("meta"):
        scaling = piece.attention(made).scaling
    with quiet(), Float64():
        rotary = piece.rotary(made)
        layer = {} if piece.layer_type is None else {"layer_type": piece.layer_type}
        q, k = piece.apply(q.double(), k.double(), rotary(q.double(), positions, **layer))
        if model == "ministral3":
            q = q * ministral3.get_llama_4_attn_scale(
                positions.double(),
                made.rope_parameters["llama_4_scaling_beta"],
                made.rope_parameters["original_max_position_embeddings"],
            )
    return q, k, scaling


def configuration(model: str, config: Mapping[str, Any]) -> Any:
    """The model's config object of a config.json's dict."""
    written = {**config}
    written.pop("model_type", None)
    written["num_hidden_layers"] = len(written.get("layer_types", (None,)))
    if model == "phi3":
        written["pad_token_id"] = 0
    with quiet():
        return MODELS[model].config(**written)


class Float64(TorchFunctionMode):
    """Widens float32, which the rope functions write down or take by default, to float64."""

    def __enter__(self) -> Any:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        torch.set_default_dtype(self._before)
        super().__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func is Tensor.float:
            func = Tensor.double
        return func(*args, **kwargs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' advice on unusual configs."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
