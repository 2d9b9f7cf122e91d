"""Owns the witness for latent attention: DeepSeek's own modules of transformers, in float64."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, DynamicCache, masking_utils
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from references.hf.given import Given
from references.hf.sdpa import _SoftmaxInFloat64

FACTOR = 40.0
"""YaRN factor of the tiny config; `mscale_all_dim` is chosen so that it gives the mscale asked."""


def mla(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    mscale: float = 1.0,
    model: str = "v3",
    steps: Sequence[int] | None = None,
) -> Tensor:
    """Output `[T, H, V]` of a DeepSeek attention module for one request, float64.

    Shapes as in `references.mla`: latent `[K, L]` and k_pe `[K, R]` of all tokens, the T new ones
    last; the K - T before them are put into a DynamicCache. steps: new tokens per call, T in all.

    The module runs its own forward: cache update, up-projection by `kv_b_proj`, key assembly,
    scale (with mscale squared) and eager attention. Stand-ins hand it the queries and the latents
    where it would project a hidden state, normalise, and rotate (by angle 0); `o_proj` is left out.

    **Where transformers means something else**: nothing found; only the path differs, for it
    materialises keys and values. V2 rotates in float32, so q_pe and the new k_pe must be float32
    values; V3 reorders the rotated columns of both, which no score can tell.

    Raises:
        ValueError: an unknown model.
    """
    if model not in ("v2", "v3"):
        raise ValueError(f"model={model!r} must be 'v2' or 'v3'")
    config, attention = _module(model, q_nope, q_pe, w_uk, w_uv, mscale)
    tokens, heads = q_nope.shape[:2]
    cached = len(latent) - tokens
    cache = DynamicCache(config=config)
    if cached:
        cache.update(_one(latent[:cached]), _one(_reordered(model, k_pe[:cached])), 0)
    outs, start = [], 0
    for step in steps or (tokens,):
        mine = slice(start, start + step)
        new = slice(cached + start, cached + start + step)
        attention.q_proj = Given(
            torch.cat([q_nope[mine], q_pe[mine]], -1).double().reshape(1, step, -1)
        )
        attention.kv_a_proj_with_mqa = Given(torch.cat([latent[new], k_pe[new]], -1).double()[None])
        hidden = torch.zeros(1, step, config.hidden_size, dtype=torch.float64)
        mask = masking_utils.create_causal_mask(
            config=config, inputs_embeds=hidden, attention_mask=None, cache=cache
        )
        with _SoftmaxInFloat64(), torch.no_grad():
            out, _ = attention(
                hidden_states=hidden,
                position_embeddings=_no_rotation(model, step, q_pe.shape[-1]),
                attention_mask=mask,
                cache=cache,
            )
        outs.append(out.reshape(step, heads, -1))
        start += step
    return torch.cat(outs)


def _module(
    model: str, q_nope: Tensor, q_pe: Tensor, w_uk: Tensor, w_uv: Tensor, mscale: float
) -> tuple[Any, Any]:
    heads, nope, latent = w_uk.shape
    rope, v_dim = q_pe.shape[-1], w_uv.shape[-1]
    make: Any = DeepseekV2Config if model == "v2" else DeepseekV3Config
    config = make(
        hidden_size=heads,  # V2 wants a multiple of the heads
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
        q_lora_rank=None,
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v_dim,
        max_position_embeddings=int(4096 * FACTOR),
        rope_parameters={
            "rope_type": "yarn",
            "factor": FACTOR,
            "mscale_all_dim": (mscale - 1) / (0.1 * math.log(FACTOR)),
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0,
        },
        attn_implementation="eager",
    )
    kind: Any = v2.DeepseekV2Attention if model == "v2" else v3.DeepseekV3Attention
    attention = kind(config, layer_idx=0).double().eval()
    attention.kv_a_layernorm = nn.Identity()
    attention.o_proj = nn.Identity()
    # One linear layer holds both: per head, the rows of W_UK and then those of W_UV.
    both = torch.cat([w_uk.double(), w_uv.double().mT], 1)
    attention.kv_b_proj.weight = nn.Parameter(both.reshape(-1, latent), requires_grad=False)
    return config, attention


def _no_rotation(model: str, tokens: int, rope: int) -> Any:
    if model == "v2":
        return torch.ones(1, tokens, rope // 2, dtype=torch.complex128)
    ones = torch.ones(1, tokens, rope, dtype=torch.float64)
    return ones, torch.zeros_like(ones)


def _reordered(model: str, k_pe: Tensor) -> Tensor:
    """V3 rotates interleaved pairs and leaves them as two halves; cached rows stand like that."""
    return k_pe if model == "v2" else torch.cat([k_pe[..., 0::2], k_pe[..., 1::2]], -1)


def _one(rows: Tensor) -> Tensor:
    """`[K, C]` as the cache has it: `[1, 1, K, C]`."""
    return rows.double()[None, None]
