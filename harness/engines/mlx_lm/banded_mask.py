"""mlx_lm's mask functions, and every cache's mask together with the keys that it returns.

A mask function is asked alone. A cache is driven through the case's schedule, with tokens that
carry their number; at the last step its mask is taken as models take it, before the update, and
read together with the keys and values that the update returns.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import torch
from mlx_lm.models import base, cache, llama4

from cases.banded_mask import WIDTH, BandedMaskCase, observed
from harness.runtimes.mlx import fetch, send
from harness.subject import Subject, Tensors

BITS, GROUP = 8, WIDTH
KEYS = ("float32", "bfloat16", "float16")
SCHEDULE = frozenset({"offset", "window", "steps"})
ROTATING = SCHEDULE | {"size", "keep"}
PADDED = SCHEDULE | {"left_padding", "right_padding"}


def _bool(mask: Any, rows: int, slots: int) -> torch.Tensor:
    """What `mx.fast.scaled_dot_product_attention` takes a mask to mean: `[batch?, n, slots]`."""
    if mask is None:
        return torch.ones(rows, slots, dtype=torch.bool)
    if isinstance(mask, str):  # "causal": aligned to the lower right
        return torch.ones(rows, slots, dtype=torch.bool).tril(slots - rows)
    shown = fetch(mask)
    return shown[:, 0] if shown.ndim == 4 else shown


def _alone(mask: Callable[[BandedMaskCase], Any]) -> Callable[[BandedMaskCase, Tensors], Tensors]:
    def run(case: BandedMaskCase, t: Tensors) -> Tensors:
        return {"visible": send(_bool(mask(case), case.n, case.written), "cpu")}

    return run


def _causal(case: BandedMaskCase) -> mx.array:
    def counts(padding: tuple[int, ...] | None) -> mx.array | None:
        return None if padding is None else mx.array(padding)

    return base.create_causal_mask(
        case.n,
        case.offset,
        window_size=case.window,
        left_padding=counts(case.left_padding),
        right_padding=counts(case.right_padding),
    )


def _cached(
    make: Callable[[BandedMaskCase], Any], *, array: bool = False
) -> Callable[[BandedMaskCase, Tensors], Tensors]:
    """Through the schedule, then the mask and the keys of the last step."""

    def run(case: BandedMaskCase, t: Tensors) -> Tensors:
        store, tokens = make(case), t["tokens"]
        start = _written(case, store, tokens)
        hidden = mx.zeros((tokens.shape[0], case.n, 1))
        mask = base.create_attention_mask(
            hidden, store, window_size=case.window, return_array=array
        )
        keys, values = store.update_and_fetch(tokens[:, :, start:], tokens[:, :, start:])
        if isinstance(store, cache.QuantizedKVCache):
            keys, values = (mx.dequantize(*x, group_size=GROUP, bits=BITS) for x in (keys, values))
        return _seen(case, mask, keys, values)

    return run


def _written(case: BandedMaskCase, store: Any, tokens: mx.array) -> int:
    """Drive `store` to the last step; how many tokens were written."""
    start = 0
    if case.right_padding and case.prompt:
        lengths = [case.prompt - p for p in case.right_padding]
        store.prepare(lengths=lengths, right_padding=list(case.right_padding))
    for step in case.steps or ((case.offset,) if case.offset else ()):
        if step < 0:
            _trim([store], -step)
            continue
        chunk = tokens[:, :, start : start + step]
        mx.eval(store.update_and_fetch(chunk, chunk))
        start += step
        if case.right_padding and start == case.prompt:
            store.finalize()
    return start


def _seen(case: BandedMaskCase, mask: Any, keys: mx.array, values: mx.array) -> Tensors:
    found = observed(case, _bool(mask, case.n, keys.shape[2]), fetch(keys), fetch(values))
    return {name: send(x, "cpu") for name, x in found.items()}


def _llama4(case: BandedMaskCase, t: Tensors) -> Tensors:
    """The mask that Llama 4's model builds for its chunked layers, over its ChunkedKVCache."""
    model: Any = llama4.LlamaModel(_LLAMA4)
    model.attention_chunk_size = case.chunk
    stores = [cache.ChunkedKVCache(case.chunk) for _ in range(3)] + [cache.KVCache()]
    seen: list[Any] = []
    start = 0

    def layer(hidden: mx.array, mask: mx.array, cache: Any) -> mx.array:
        new = t["tokens"][:, :, start : start + hidden.shape[1]]
        seen.append((mask, *cache.update_and_fetch(new, new)))
        return hidden

    model.layers = [layer] * 4
    for step in (*(case.steps or ((case.offset,) if case.offset else ())), case.n):
        seen.clear()
        if step < 0:
            _trim(stores, -step)
            continue
        model(mx.zeros((1, step), mx.int32), stores)
        start += step
    return _seen(case, *seen[0])


def _trim(stores: list[Any], count: int) -> None:
    trimmed = cache.trim_prompt_cache(stores, count)
    if trimmed != count:
        raise RuntimeError(f"asked to trim {count} tokens, the cache trimmed {trimmed}")


_LLAMA4 = llama4.TextArgs(
    attention_bias=False, attention_chunk_size=1, head_dim=8, hidden_size=8,
    interleave_moe_layer_step=1, intermediate_size=8, intermediate_size_mlp=8,
    max_position_embeddings=8, model_type="llama4", num_attention_heads=1, num_experts_per_tok=1,
    num_hidden_layers=0, num_key_value_heads=1, num_local_experts=1, rms_norm_eps=1e-5,
    rope_scaling=None, rope_theta=1e4, use_qk_norm=False, vocab_size=1,
)  # fmt: skip


def _prompted(case: BandedMaskCase) -> str | None:
    if case.right_padding and not case.steps:
        return "a cache is told of right padding before a prompt: a schedule is needed"
    return None


def _sized(case: BandedMaskCase) -> str | None:
    if case.reach is None:
        return "a rotating cache needs a size"
    live = 0
    for step in case.steps:
        if step < 0 and live >= (case.size or case.reach):
            return "a full rotating cache says that it can't be trimmed"
        live += step
    return _prompted(case)


def _chunked(case: BandedMaskCase) -> str | None:
    return "a chunked cache needs the length of a chunk" if case.chunk is None else None


def _left(case: BandedMaskCase) -> list[int]:
    return list(case.left_padding or (0,) * (case.batch or 1))


def _rotating(case: BandedMaskCase) -> Any:
    size = case.size or case.window
    if case.batch is None:
        return cache.RotatingKVCache(max_size=size, keep=case.keep)
    return cache.BatchRotatingKVCache(size, _left(case))


def _subject(name: str, run: Any, claims: frozenset[str], dtypes: Any, **more: Any) -> Subject:
    return Subject(
        name=f"mlx_lm.banded_mask.{name}",
        run=run,
        runtime="mlx",
        claims=claims,
        dtypes=dtypes,
        lanes=("mps",),
        kernels=("mlx:{device}",),
        **more,
    )


SUBJECTS = (
    _subject("create_causal_mask", _alone(_causal), PADDED - {"steps"}, ("bool",)),
    _subject(
        "create_attention_mask",
        _alone(
            lambda case: cache.create_attention_mask(
                case.n, case.offset, return_array=False, window_size=case.window
            )
        ),
        frozenset({"offset", "window"}),
        ("bool",),
    ),
    _subject("kv_cache", _cached(lambda case: cache.KVCache()), SCHEDULE, KEYS),
    _subject("kv_cache_array", _cached(lambda case: cache.KVCache(), array=True), SCHEDULE, KEYS),
    _subject("concatenate", _cached(lambda case: cache.ConcatenateKVCache()), SCHEDULE, KEYS),
    _subject(
        "quantized",
        _cached(lambda case: cache.QuantizedKVCache(group_size=GROUP, bits=BITS)),
        SCHEDULE,
        KEYS,
    ),
    _subject("rotating", _cached(_rotating), ROTATING, KEYS, refusal=_sized),
    _subject("rotating_array", _cached(_rotating, array=True), ROTATING, KEYS, refusal=_sized),
    _subject(
        "batch",
        _cached(lambda case: cache.BatchKVCache(_left(case))),
        PADDED,
        KEYS,
        refusal=_prompted,
    ),
    _subject("batch_rotating", _cached(_rotating), PADDED | {"size"}, KEYS, refusal=_sized),
    _subject("llama4", _llama4, frozenset({"offset", "chunk", "steps"}), KEYS, refusal=_chunked),
)
