"""sglang's rotary embeddings: `get_rope` itself, and as its models build and scale it.

What a model builds is asked here, its rotary module and its softmax scale; the module then rotates
q and k of all requests in one call, as in a prefill of them.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import sglang.srt.layers.rotary_embedding.base as rotary
import torch
from sglang.multimodal_gen.runtime.layers.attention import selector
from sglang.multimodal_gen.runtime.models.encoders import mistral_3
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.srt.configs.laguna import LagunaConfig
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.layers.rotary_embedding.yarn import yarn_get_mscale, yarn_get_mscale_simple
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from sglang.srt.models.laguna import LagunaAttention
from sglang.srt.models.llama import LlamaDecoderLayer
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers.common import get_rope_config
from torch import Tensor, nn
from transformers import DeepseekV3Config, LlamaConfig, Ministral3Config
from transformers.utils import logging

from cases.yarn import YarnCase
from harness.subject import Tensors
from references.hf.given import Given
from references.yarn import probe_columns

Turn = Callable[[YarnCase, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(case, q, k, positions) to rotated q and k, all `[batch, heads, len, head_dim]`."""
Built = tuple[Turn, float]
"""What a model does to q and k, and the softmax scale that goes with it."""


def direct(case: YarnCase) -> Built:
    """get_rope with what the config says, in sglang's own terms.

    `attn_factor` multiplies what sglang takes without it, `attention_factor` is the final value.
    """
    config = case.config()
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    base = scaling.pop("rope_theta", config.get("rope_theta"))
    if case.attention_factor is not None and case.yarn:
        scaling["attn_factor"] = scaling.pop("attention_factor") / _implied(case)
    if case.attention_factor is not None and case.longrope:
        scaling["short_mscale"] = scaling["long_mscale"] = scaling.pop("attention_factor")
    rope = factory.get_rope(
        case.head_dim,
        case.head_dim,
        case.max_positions,
        base,
        is_neox_style=not case.interleaved,
        rope_scaling=scaling or None,
        partial_rotary_factor=case.partial or 1.0,
    )
    return _module(rope), case.head_dim**-0.5


def _implied(case: YarnCase) -> float:
    factor = case.rope.factor
    if case.mscale is not None and case.mscale_all_dim is not None:
        return yarn_get_mscale(factor, case.mscale) / yarn_get_mscale(factor, case.mscale_all_dim)
    return yarn_get_mscale_simple(factor)


def llama(case: YarnCase) -> Built:
    attention = LlamaDecoderLayer(_config(LlamaConfig, case), stage_boundaries=False).self_attn
    return _module(attention.rotary_emb), attention.scaling


def laguna(case: YarnCase) -> Built:
    config = _config(LagunaConfig, case, num_hidden_layers=2)
    attention = LagunaAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        layer_id=0,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.full_rope_scaling,
        partial_rotary_factor=config.partial_rotary_factor,
        max_position_embeddings=config.max_position_embeddings,
        attention_bias=False,
        sliding_window_size=config.sliding_window - 1,
        layer_type=config.layer_types[0],
    )
    return _module(attention.rotary_emb), attention.scaling


def deepseek_v3(case: YarnCase) -> Built:
    config = _config(DeepseekV3Config, case, q_lora_rank=None, kv_lora_rank=8, v_head_dim=8)
    base, scaling = get_rope_config(config)
    attention = DeepseekV2AttentionMLA(
        config=config,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        rope_theta=base,
        rope_scaling=scaling,
        max_position_embeddings=config.max_position_embeddings,
        layer_id=0,
    )
    return _module(attention.rotary_emb), attention.scaling


def ministral3(case: YarnCase) -> Built:
    """The diffusion runtime's own decoder: its attention, up to the call of its backend."""
    config = _config(Ministral3Config, case)
    with selector.global_force_attn_backend_context_manager(AttentionBackendEnum.TORCH_SDPA):
        attention = mistral_3.MistralAttention(config, 0)
    rope = mistral_3.MistralRotaryEmbedding(config)
    attention.attn = _Backend()

    def turn(case: YarnCase, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        for name, x in (("q_proj", q), ("k_proj", k), ("v_proj", torch.zeros_like(k))):
            setattr(attention, name, Given(x.transpose(1, 2).flatten(2)))
        hidden = q.new_zeros(q.shape[0], q.shape[2], 1)
        try:
            attention(hidden, rope(hidden, positions), None, position_ids=positions)
        except _Captured as call:
            return call.query.transpose(1, 2), call.key.transpose(1, 2)
        raise RuntimeError("the attention did not reach its backend")

    return turn, attention.scaling


class _Captured(Exception):
    """Carries what the attention backend was called with; ends the forward pass there."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        super().__init__("the attention backend was reached")
        self.query, self.key = query, key


class _Backend(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None) -> Tensor:
        raise _Captured(query, key)


def _config(kind: Any, case: YarnCase, **more: Any) -> Any:
    """The model's config from the case's config.json, as a checkpoint's is read."""
    written = {**case.config(), **more}
    del written["model_type"]
    small = {"intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1, "pad_token_id": 0}
    return kind(**{**written, **small, "hidden_size": case.heads, **more})


@functools.cache
def _server() -> None:
    """What a server has set up before it builds a model: its arguments, and the CPU engine.

    The real CPU engine asks for sgl_kernel before anything else; to the rotary modules it is this.
    """
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test")
    rotary._is_cpu = True


@contextlib.contextmanager
def _building(dtype: torch.dtype) -> Iterator[None]:
    """As while a model is loaded: in its dtype; here with no rope from an earlier case."""
    _server()
    before, level = torch.get_default_dtype(), logging.get_verbosity()
    torch.set_default_dtype(dtype)
    logging.set_verbosity_error()
    factory._ROPE_DICT.clear()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        logging.set_verbosity(level)
        factory._ROPE_DICT.clear()


def answer(name: str) -> Callable[[YarnCase, Tensors], Tensors]:
    """The answer of the rope and scale that the function `name` makes of the case."""
    build: Callable[[YarnCase], Built] = {
        "direct": direct, "llama": llama, "laguna": laguna, "deepseek_v3": deepseek_v3,
        "ministral3": ministral3,
    }[name]  # fmt: skip

    def run(case: YarnCase, tensors: Tensors) -> Tensors:
        q, k = tensors["q"], tensors["k"]
        with _building(q.dtype):
            turn, scale = build(case)
        positions = torch.cat((tensors["q_positions"], tensors["k_positions"]), 1)
        wide_q = torch.cat((q, q.new_zeros(*q.shape[:2], k.shape[2], q.shape[3])), 2)
        wide_k = torch.cat((k.new_zeros(*k.shape[:2], q.shape[2], k.shape[3]), k), 2)
        query, key = turn(case, wide_q, wide_k, positions)
        query, key = query[:, :, : case.q_len], key[:, :, case.q_len :]
        out = {"logits": _logits(query, key, scale)}
        if case.composed:
            out["scale"] = _composed(case, build)
        return out | ({"q": query, "k": key} if case.rotated else {})

    return run


def _module(rope: Any) -> Turn:
    """A rotary module as the server's models call it, its table long enough for the positions."""

    def turn(case: YarnCase, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(rope, "_ensure_cos_sin_cache_length"):
            rope._ensure_cos_sin_cache_length(int(positions.max()))
        flat = [x[..., case.nope :].transpose(1, 2).flatten(0, 1) for x in (q, k)]
        if not case.nope:  # latent attention alone hands over tokens with their heads
            flat = [x.flatten(1) for x in flat]
        found = []
        for x, y in zip((q, k), rope(positions.flatten(), *flat), strict=True):
            y = y.reshape(x.shape[0], x.shape[2], x.shape[1], -1).transpose(1, 2)
            found.append(torch.cat((x[..., : case.nope], y), -1) if case.nope else y)
        return found[0], found[1]

    return turn


def _logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query.float() @ key.float().mT) * scale


def _composed(case: YarnCase, build: Callable[[YarnCase], Built]) -> Tensor:
    """The composed scale, measured: logits of unit vectors at position 0, in float32."""
    with _building(torch.float32):
        turn, scale = build(case)
    probe = torch.zeros(1, 1, 2, case.head_dim)
    for token, column in enumerate(probe_columns(case.rope)):
        probe[0, 0, token, column] = 1.0
    q = probe.expand(1, case.heads, 2, case.head_dim)
    k = probe.expand(1, case.kv_heads, 2, case.head_dim)
    query, key = turn(case, q, k, torch.zeros(1, 2, dtype=torch.int64))
    return _logits(query, key, scale)[0, 0].diagonal().contiguous()
