"""vLLM's CPU attention over a paged cache: the kernel by instruction set, and its backend."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from cases.sdpa import Claims, SdpaCase
from harness.engines.vllm import part
from harness.subject import Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
NAMES = frozenset(
    {
        "causal", "window", "sinks", "softcap", "scale", "kv_lens", "q_lens", "side", "schedule",
        "page_size", "poison", "alibi",
    }
)  # fmt: skip
VEC = Claims(NAMES, head_dims=(32, 64, 96, 128, 256), pages=(32, 64, 96, 128), cached=True)
VEC16 = Claims(NAMES, head_dims=(64, 32, 80, 96, 112, 128), pages=(16, 32, 48), cached=True)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One step of the schedule, packed as vLLM packs it; T tokens of the requests, one after the
    other.

    rows: bool [batch, q_len], which queries are in it. query: [T, heads, head_dim].
    key, value: [new tokens, kv_heads, head_dim], for the `slots` of the cache.
    start: int32 [batch + 1], where the queries of each request begin. seq_lens: int32 [batch].
    """

    rows: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    start: torch.Tensor
    seq_lens: torch.Tensor


def _calls(case: SdpaCase, t: Tensors, table: torch.Tensor, page: int) -> Iterator[_Call]:
    """The calls of a case. The first brings the cached prefix into the cache as well."""
    written = 0
    for start, end, keys in case.steps():
        rows, fresh = torch.zeros(case.batch, case.q_len, dtype=torch.bool), []
        queries, lengths, slots = [], [], []
        for b, (n, k) in enumerate(zip(*_lengths(case, end - start, keys), strict=True)):
            first = case.q_len - n if case.side == "left" else start
            rows[b, first : first + n] = True
            at = torch.arange(written, k)
            fresh.append(torch.arange(written, k) + (case.kv_len - k if case.side == "left" else 0))
            slots.append(table[b, at // page].long() * page + at % page)
            queries.append(n)
            lengths.append(k)
        yield _Call(
            rows=rows,
            query=t["q"].transpose(1, 2)[rows],
            key=torch.cat([t["k"][b, :, at].transpose(0, 1) for b, at in enumerate(fresh)]),
            value=torch.cat([t["v"][b, :, at].transpose(0, 1) for b, at in enumerate(fresh)]),
            slots=torch.cat(slots),
            start=torch.tensor([0, *queries]).cumsum(0).int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
        )
        written = keys


def _lengths(case: SdpaCase, queries: int, keys: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(queries, keys) of each request in a call; a schedule has no padding."""
    return (
        case.q_lens or (queries,) * case.batch,
        case.kv_lens or (keys,) * case.batch,
    )


def _paged(case: SdpaCase, t: Tensors, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache [pages, kv_heads, page, 2 * head_dim] of poison, and the table of its pages."""
    if case.page_size is not None:
        table, pages = t["table"], case.pages
    else:
        each = -(-case.kv_len // page)
        table, pages = torch.arange(case.batch * each).view(case.batch, each).int(), 0
        pages = case.batch * each
    shape = (pages, case.kv_heads, page, 2 * case.head_dim)
    return torch.full(shape, case.bad, dtype=t["q"].dtype), table


def _sinks(t: Tensors) -> torch.Tensor | None:
    """As the backend passes them: it reads bfloat16 and float32."""
    sinks = t.get("sinks")
    return sinks.float() if sinks is not None and sinks.dtype == torch.float16 else sinks


def _plan(case: SdpaCase, call: _Call, **more: Any) -> torch.Tensor:
    """How the kernel is to split a call over threads; more: what its callers say differently."""
    return part("_custom_ops").cpu_attn_get_scheduler_metadata(
        num_reqs=case.batch,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        seq_lens=call.seq_lens,
        dtype=call.query.dtype,
        query_start_loc=call.start,
        causal=case.causal,
        **more,
    )


def _kernel(isa: str, page: int) -> Callable[[SdpaCase, Tensors], Tensors]:
    """The operators themselves, on the instruction set that is named."""

    def run(case: SdpaCase, t: Tensors) -> Tensors:
        ops = part("_custom_ops")
        size = case.page_size or page
        cache, table = _paged(case, t, size)
        keys, values = cache.view(*cache.shape[:2], 2 * size, case.head_dim).chunk(2, 2)
        out = torch.zeros(case.batch, case.q_len, case.heads, case.head_dim, dtype=t["q"].dtype)
        for call in _calls(case, t, table, size):
            ops.cpu_attn_reshape_and_cache(call.key, call.value, keys, values, call.slots, isa)
            plan = _plan(
                case, call, isa=isa, sliding_window_size=case.window or -1, enable_kv_split=True
            )
            rows = torch.zeros_like(call.query)
            ops.cpu_attention_with_kv_cache(
                query=call.query,
                key_cache=keys,
                value_cache=values,
                output=rows,
                query_start_loc=call.start,
                seq_lens=call.seq_lens,
                scale=case.softmax_scale,
                causal=case.causal,
                alibi_slopes=t.get("alibi"),
                sliding_window=case.window or -1,
                block_table=table,
                softcap=case.softcap or 0.0,
                scheduler_metadata=plan,
                s_aux=_sinks(t),
            )
            out[call.rows] = rows
        return {"out": out.transpose(1, 2)}

    return run


class _Layer:
    """What the backend reads of the layer that it serves."""

    _k_scale_float = _v_scale_float = 1.0

    def __init__(self, isa: str) -> None:
        self.isa = isa


def _backend(case: SdpaCase, t: Tensors) -> Tensors:
    """CPU_ATTN as a model's layer calls it: cache update, then forward, on the isa it chooses."""
    backend = part("v1.attention.backends.cpu_attn")
    size = case.page_size or 32
    cache, table = _paged(case, t, size)
    out = torch.zeros(case.batch, case.q_len, case.heads, case.head_dim, dtype=t["q"].dtype)
    with _configured(case.dtype):
        layer = backend.CPUAttentionBackendImpl(
            num_heads=case.heads,
            head_size=case.head_dim,
            scale=case.softmax_scale,
            num_kv_heads=case.kv_heads,
            alibi_slopes=None if case.alibi is None else t["alibi"].tolist(),
            sliding_window=case.window,
            kv_cache_dtype="auto",
            logits_soft_cap=case.softcap,
            sinks=t.get("sinks"),
        )
    isa = backend._get_attn_isa(t["q"].dtype, size, case.head_dim, "auto")
    for call in _calls(case, t, table, size):
        layer.do_kv_cache_update(_Layer(isa), call.key, call.value, cache, call.slots)
        plan = _plan(
            case,
            call,
            sliding_window_size=layer.sliding_window,
            isa=isa,
            enable_kv_split=part("envs").VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype="auto",
        )
        rows = torch.zeros_like(call.query)
        metadata = backend.CPUAttentionMetadata(
            num_actual_tokens=len(rows),
            max_query_len=int(call.start.diff().max()),
            query_start_loc=call.start,
            max_seq_len=int(call.seq_lens.max()),
            seq_lens=call.seq_lens,
            block_table=table,
            slot_mapping=call.slots,
            scheduler_metadata=plan,
            causal=case.causal,
        )
        layer.forward(_Layer(isa), call.query, call.key, call.value, cache, metadata, rows)
        out[call.rows] = rows
    return {"out": out.transpose(1, 2)}


@contextmanager
def _configured(dtype: str) -> Iterator[None]:
    """An engine's configuration without a model, of which the backend reads the dtype alone."""
    config = _default_config()
    config.model_config = SimpleNamespace(dtype=getattr(torch, dtype))
    try:
        with part("config").set_current_vllm_config(config):
            yield
    finally:
        config.model_config = None


@functools.cache
def _default_config() -> Any:
    return part("config").VllmConfig()


def _subject(name: str, run: Callable[[SdpaCase, Tensors], Tensors], claims: Claims) -> Subject:
    return Subject(
        name=f"vllm.sdpa.{name}",
        run=run,
        claims=claims,
        dtypes=DTYPES,
        refusal=claims.lacking,
        kernels=("_C::cpu_attention_with_kv_cache", "_C::cpu_attn_reshape_and_cache"),
    )


SUBJECTS = (
    _subject("cpu_attention_vec", _kernel("vec", 32), VEC),
    _subject("cpu_attention_vec16", _kernel("vec16", 16), VEC16),
    _subject("cpu_attn_backend", _backend, VEC),
)
