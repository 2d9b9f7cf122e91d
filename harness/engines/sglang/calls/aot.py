"""The gate before the Metal kernel that rotates q and k of a batched decode, and both ways past it.

Every token is a request that decodes it. Where the gate lets the kernel of sgl_kernel.metal rotate,
and there is no Metal, what that kernel computes stands for it: plain rope at a base.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from sglang.srt.hardware_backend.mlx import aot
from sglang.srt.hardware_backend.mlx.kv_cache.attention_kv_pool import MlxAttentionKVPool
from sglang.srt.hardware_backend.mlx.kv_cache.attention_wrapper import MLXAttentionWrapper

from cases.yarn import YarnCase
from harness.subject import Tensors
from references.yarn import probe_columns


def _plain(
    q: mx.array, k: mx.array, v: mx.array, positions: mx.array, slots: mx.array,
    k_pool: mx.array, v_pool: mx.array, *, head_dim: int, num_qo_heads: int, num_kv_heads: int,
    rope_base: float,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:  # fmt: skip
    """sgl_kernel.metal.rope_pool_fused without a pool to write to (slots of -1)."""
    del v, slots, num_qo_heads, num_kv_heads
    turned = [
        mx.fast.rope(
            x[:, :, None], head_dim, traditional=False, base=rope_base, scale=1.0, offset=positions
        )[:, :, 0]
        for x in (q, k)
    ]
    return turned[0], turned[1], k_pool, v_pool


def _fused() -> Any:
    try:
        return _of_metal()
    except ImportError:
        return _plain


_of_metal = aot._load_metal_rope_pool_fused
aot._load_metal_rope_pool_fused = _fused


def decode(case: YarnCase, t: Tensors) -> Tensors:
    """q and k of mlx_lm's Llama as MLXAttentionWrapper rotates them when it decodes a batch."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8, "rms_norm_eps": 1e-6}
    attention = llama.Attention(llama.ModelArgs.from_dict({**sizes, **case.config()}))
    rope: Any = attention.rope
    kernel = aot._build_rope_kernel(
        aot.MlxAOTKernelBuildInputs(attention, case.kv_heads, case.head_dim)
    )

    def turn(q: mx.array, k: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        if not kernel.enabled:
            return rope(q, offset=positions), rope(k, offset=positions)
        pool = MlxAttentionKVPool(1, 1, case.kv_heads, case.head_dim, k.dtype)
        context = aot.MlxAOTRoPEContext(kernel, pool)
        return MLXAttentionWrapper._rope_custom_aot(q, k, k, positions, 0, context)

    q = _tokens(t["q"])
    k = _tokens(t["k"])
    at_q, at_k = (t[name].reshape(-1).astype(mx.int32) for name in ("q_positions", "k_positions"))
    q, _ = turn(q, mx.zeros((q.shape[0], case.kv_heads, 1, case.head_dim), q.dtype), at_q)
    _, k = turn(mx.zeros((k.shape[0], case.heads, 1, case.head_dim), k.dtype), k, at_k)
    q, k = _rows(q, case.batch), _rows(k, case.batch)
    out = {"logits": _logits(q, k, attention.scale)}
    if case.composed:
        probe = np.zeros((2, 1, 1, case.head_dim), np.float32)
        for token, column in enumerate(probe_columns(case.rope)):
            probe[token, 0, 0, column] = 1
        ends = [
            turn(mx.repeat(x, case.heads, 1), mx.repeat(x, case.kv_heads, 1), mx.array([0]))
            for x in (mx.array(probe[i : i + 1]) for i in range(2))
        ]
        out["scale"] = mx.stack([_logits(q, k, attention.scale)[0, 0, 0, 0] for q, k in ends])
    return out | ({"q": q, "k": k} if case.rotated else {})


def _tokens(x: mx.array) -> mx.array:
    """`[batch, heads, len, head_dim]` as a batch of single tokens, `[batch * len, heads, 1, .]`."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * length, heads, 1, width)


def _rows(x: mx.array, batch: int) -> mx.array:
    """The way back from `_tokens`."""
    return x.reshape(batch, -1, x.shape[1], x.shape[3]).transpose(0, 2, 1, 3)


def _logits(q: mx.array, k: mx.array, scale: float) -> mx.array:
    k = mx.repeat(k.astype(mx.float32), q.shape[1] // k.shape[1], 1)
    return (q.astype(mx.float32) @ k.swapaxes(-1, -2)) * scale
