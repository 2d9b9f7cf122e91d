"""Masks and caches of sglang's MLX server, as mlx_lm's models take them.

A cache is driven through the case's schedule, with tokens that carry their number; at the last step
its mask is taken before the update, and read together with the keys that the update returns.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import mlx.core as mx
import torch
from mlx_lm.models import base
from sglang.srt.hardware_backend.mlx.kv_cache import attention_kv_cache as caches
from sglang.srt.hardware_backend.mlx.kv_cache.attention_kv_pool import MlxAttentionKVPool

from cases import values
from cases.banded_mask import BandedMaskCase, observed
from harness.runtimes.mlx import fetch, send
from harness.subject import Tensors

SMALL = 4
"""Tokens that a contiguous cache holds before it grows (4096 in the server)."""


def make_attention_mask(case: BandedMaskCase, t: Tensors) -> Tensors:
    """The function itself; every second case is asked for an array, as some models do."""
    mask = caches.make_attention_mask(
        case.n, case.offset, return_array=case.seed % 2 == 1, window_size=case.window
    )
    return {"visible": send(_bool(mask, case.n, case.written), "cpu")}


def offset_cache(case: BandedMaskCase, t: Tensors) -> Tensors:
    """The cache without keys that stands for all requests of a batch while they decode."""
    mask = _mask(case, caches.AttentionOffsetCache(case.offset))
    return {"visible": send(_bool(mask, case.n, case.written), "cpu")}


def contiguous(case: BandedMaskCase, t: Tensors) -> Tensors:
    """ContiguousAttentionKVCache, small enough to grow on its way."""
    return _last(case, t, caches.ContiguousAttentionKVCache(max_seq_len=SMALL), case.steps)


def windowed(case: BandedMaskCase, t: Tensors) -> Tensors:
    """WindowedAttentionKVCache, which drops and compacts what its window has left behind."""
    return _last(case, t, caches.WindowedAttentionKVCache(case.size or case.window), case.steps)


def pooled(case: BandedMaskCase, t: Tensors) -> Tensors:
    """A prefix in the pool, in slots of no order; a schedule goes on as the server does.

    The first step is the prefix, the second reads it out of the pool, and the cache is contiguous
    from there on.
    """
    prefix = case.steps[0] if case.steps else case.offset
    store: Any = _pool(case, t["tokens"][:, :, :prefix])
    if len(case.steps) < 2:
        return _last(case, t, store, (), prefix)
    stop = prefix + case.steps[1]
    new = t["tokens"][:, :, prefix:stop]
    store.update_and_fetch(new, new)
    return _last(case, t, store.to_contiguous(max_seq_len=SMALL), case.steps[2:], stop)


def _pool(case: BandedMaskCase, tokens: mx.array) -> caches.PoolBackedAttentionKVCache:
    count, width = tokens.shape[2], tokens.shape[3]
    pool = MlxAttentionKVPool(2 * count + 1, 1, 1, width, tokens.dtype)
    slots = values.integers(case.seed, "slots", (2 * count,), 0, 2**31 - 1).argsort()[:count] + 1
    where = mx.array(slots.numpy())
    rows = tokens[0].transpose(1, 0, 2)
    if count:
        pool.set_kv(0, where, rows, rows)
    return caches.PoolBackedAttentionKVCache(pool, 0, where, count)


def _last(
    case: BandedMaskCase, t: Tensors, store: Any, steps: tuple[int, ...], start: int = 0
) -> Tensors:
    """Through `steps` from token `start` on, then the mask and the keys of the last one."""
    tokens = t["tokens"]
    for step in steps or ((case.offset - start,) if case.offset > start else ()):
        chunk = tokens[:, :, start : start + step]
        mx.eval(store.update_and_fetch(chunk, chunk))
        start += step
    mask = _mask(case, store)
    keys, held = store.update_and_fetch(tokens[:, :, start:], tokens[:, :, start:])
    seen = observed(case, _bool(mask, case.n, keys.shape[2]), fetch(keys), fetch(held))
    return {name: send(x, "cpu") for name, x in seen.items()}


def _mask(case: BandedMaskCase, store: Any) -> Any:
    """As mlx_lm's containers ask for it; the window is that of the layer."""
    hidden = mx.zeros((1, case.n, 1))
    window = case.size if case.window is None else case.window
    return base.create_attention_mask(
        hidden, store, window_size=window, return_array=case.seed % 2 == 1
    )


def _bool(mask: Any, rows: int, slots: int) -> torch.Tensor:
    """What `mx.fast.scaled_dot_product_attention` takes a mask to mean: bool `[rows, slots]`."""
    if mask is None:
        return torch.ones(rows, slots, dtype=torch.bool)
    if isinstance(mask, str):  # "causal": aligned to the lower right
        return torch.ones(rows, slots, dtype=torch.bool).tril(slots - rows)
    return fetch(mask)
