"""mlx_lm's shared attention call over its caches, step by step as its models make it.

`QuantizedKVCache` is not asked here: its keys and values are rounded to 8 bits, which answers
another question than the contract's; what it stores and shows is judged under banded_mask.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base, cache

from cases.sdpa import SdpaCase
from harness.programs import sdpa as programs
from harness.subject import Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
CLAIMS = frozenset({"causal", "window", "scale", "layout", "schedule", "sinks"})


def _cached(make: Callable[[SdpaCase], Any]) -> Callable[[SdpaCase, Tensors], Tensors]:
    def run(case: SdpaCase, t: Tensors) -> Tensors:
        store, q, k, v = (
            make(case),
            t["q"],
            _on_the_right(case, t["k"]),
            _on_the_right(case, t["v"]),
        )
        if first := case.kv_len - case.q_len:  # keys of queries that are not asked for
            store.update_and_fetch(k[:, :, :first], v[:, :, :first])
        outs = []
        for start, end, keys in case.steps():
            rows = slice(keys - (end - start), keys)
            hidden = mx.zeros((case.batch, end - start, 1))
            mask: Any = base.create_attention_mask(hidden, store, window_size=case.window)
            held_k, held_v = store.update_and_fetch(k[:, :, rows], v[:, :, rows])
            outs.append(
                base.scaled_dot_product_attention(
                    q[:, :, start:end],
                    held_k,
                    held_v,
                    cache=store,
                    scale=case.softmax_scale,
                    mask=mask,
                    sinks=t.get("sinks"),
                )
            )
        return {"out": mx.concatenate(outs, axis=2)}

    return run


def _on_the_right(case: SdpaCase, x: mx.array) -> mx.array:
    """A batch's valid keys at the right end, as `BatchKVCache` expects them."""
    if case.kv_lens is None or case.side == "left":
        return x
    shifts = [case.kv_len - length for length in case.kv_lens]
    return mx.stack([mx.roll(row, shift, 1) for row, shift in zip(x, shifts, strict=True)])


def _in_cache(case: SdpaCase) -> str | None:
    """Models write the keys of their own queries, causally."""
    if not case.causal and case.q_len > 1:
        return "mlx_lm's caches are causal: only a single query sees all keys"
    if case.q_len > case.kv_len:
        return "a cache holds at least the keys of its own queries"
    return None


def _batch(case: SdpaCase) -> cache.BatchKVCache:
    lens = case.kv_lens or (case.kv_len,) * case.batch
    return cache.BatchKVCache([case.kv_len - length for length in lens])


def _subject(
    name: str,
    make: Callable[[SdpaCase], Any],
    claims: frozenset[str] = CLAIMS,
) -> Subject:
    return Subject(
        name=f"mlx_lm.sdpa.{name}",
        run=_cached(make),
        runtime="mlx",
        claims=claims,
        dtypes=DTYPES,
        lanes=("mps",),
        programs={"cpu": programs.program(programs.MLX)},
        refusal=_in_cache,
        kernels=("mlx:{device}",),
    )


SUBJECTS = (
    _subject("kv_cache", lambda case: cache.KVCache()),
    _subject("concatenate", lambda case: cache.ConcatenateKVCache()),
    _subject("rotating", lambda case: cache.RotatingKVCache(case.window or case.kv_len)),
    _subject("batch", _batch, CLAIMS | {"kv_lens", "side"}),
)
