"""Bugs planted into vLLM's own code from outside, in its worker.

Two that its own tests let pass on a CPU without AVX-512 (softcap ignored, the scale off by 0.1 %),
and those of the seed reports. SUBJECTS are the ordinary subjects of `harness.engines.vllm`, each
with one part of vLLM replaced while it answers. Read in both processes: vLLM is imported where a
subject runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from cases.mla import MlaCase
from cases.sdpa import SdpaCase
from harness.engines.vllm import part
from tests.planting import Patch, Plant


def _called_with(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    """change: the keywords of `_custom_ops.<name>`, to those that it is called with instead."""

    def patch() -> contextlib.AbstractContextManager[Any]:
        ops = part("_custom_ops")
        right = getattr(ops, name)
        return mock.patch.object(ops, name, lambda **given: right(**change(given)))

    return patch


def _attention(**change: Callable[[Any], Any]) -> Patch:
    """The kernel gets other values of some arguments; change: old value to new one."""
    return _called_with(
        "cpu_attention_with_kv_cache",
        lambda given: given | {name: new(given[name]) for name, new in change.items()},
    )


def _built_with(**fixed: Any) -> Patch:
    """CPU_ATTN is built with other arguments than its model gives."""

    def patch() -> contextlib.AbstractContextManager[Any]:
        layer = part("v1.attention.backends.cpu_attn").CPUAttentionBackendImpl
        right = layer.__init__

        def wrong(self: Any, *args: Any, **more: Any) -> None:
            right(self, *args, **{**more, **fixed})

        return mock.patch.object(layer, "__init__", wrong)

    return patch


def _off_by_one(table: Any, pages: int) -> Any:
    """The block table whose first entry of the first request names the page after its own."""
    table = table.clone()
    table[0, 0] = (table[0, 0] + 1) % pages
    return table


_entry_of_attention = _called_with(
    "cpu_attention_with_kv_cache",
    lambda given: (
        given | {"block_table": _off_by_one(given["block_table"], len(given["key_cache"]))}
    ),
)
_wider = _attention(sliding_window=lambda window: window + 1 if window > 0 else window)


def _entry_of_latent_decode() -> contextlib.AbstractContextManager[Any]:
    ops = part("_custom_ops")
    right = ops.mla_decode_kvcache_cpu

    def wrong(out: Any, query: Any, cache: Any, scale: float, table: Any, lens: Any) -> None:
        right(out, query, cache, scale, _off_by_one(table, len(cache)), lens)

    return mock.patch.object(ops, "mla_decode_kvcache_cpu", wrong)


def _entry_of_amx() -> contextlib.AbstractContextManager[Any]:
    """In the table that AMX_MLA writes out row by row."""
    amx = part("v1.attention.backends.mla.amx_mla")
    right = amx._expand_block_table

    def wrong(table: Any, size: int) -> Any:
        return right(_off_by_one(table, int(table.max()) + 1), size)

    return mock.patch.object(amx, "_expand_block_table", wrong)


_ATTENTION = SdpaCase(
    dtype="float32", seed=1, values="normal", batch=1, q_len=1, kv_len=12, heads=2, kv_heads=1,
    head_dim=32, causal=True,
)  # fmt: skip
_LATENT = MlaCase(
    dtype="float32", seed=0, values="page_probe", batch=2, kv_len=32, heads=2, latent_dim=512,
    rope_dim=64, nope_dim=128, v_dim=128, page_size=16,
)  # fmt: skip
PLANTS = (
    Plant(
        name="softcap ignored",
        subject="vllm.sdpa.cpu_attn_backend",
        faults=("softcap-ignored",),
        telling=replace(_ATTENTION, softcap=2.0),
        patch=_built_with(logits_soft_cap=None),
    ),
    Plant(
        name="softcap ignored by the kernel",
        subject="vllm.sdpa.cpu_attention_vec16",
        faults=("softcap-ignored",),
        telling=replace(_ATTENTION, head_dim=80, softcap=2.0),
        patch=_attention(softcap=lambda cap: 0.0),
    ),
    Plant(
        name="scale off by 0.1 %",
        subject="vllm.sdpa.cpu_attention_vec",
        faults=("scale-plus-0.1%",),
        telling=replace(_ATTENTION, values="loud"),
        patch=_attention(scale=lambda scale: scale * 1.001),
    ),
    Plant(
        name="W+1 keys",
        subject="vllm.sdpa.cpu_attention_vec",
        faults=("window-plus-one",),
        telling=replace(_ATTENTION, window=4),
        patch=_wider,
    ),
    Plant(
        name="window one key more than the kernel is planned for",
        subject="vllm.sdpa.cpu_attn_backend",
        faults=("window-plus-one",),
        telling=replace(_ATTENTION, window=4),
        patch=_wider,
    ),
    Plant(
        name="sinks dropped",
        subject="vllm.sdpa.cpu_attn_backend",
        faults=("sink-dropped",),
        telling=replace(_ATTENTION, sinks=0.0),
        patch=_built_with(sinks=None),
    ),
    Plant(
        name="one page entry off by one",
        subject="vllm.sdpa.cpu_attn_backend",
        faults=(),
        telling=replace(_ATTENTION, values="mask_probe", batch=2),
        patch=_entry_of_attention,
        reading="reads values of request 1, kv head 0, expected request 0",
    ),
    Plant(
        name="one page entry off by one in latent decode",
        subject="vllm.mla.cpu_mla",
        faults=(),
        telling=_LATENT,
        patch=_entry_of_latent_decode,
        reading="what it misses lies in page",
    ),
    Plant(
        name="one page entry off by one under AMX",
        subject="vllm.mla.amx_decode",
        faults=(),
        telling=replace(_LATENT, dtype="bfloat16", page_size=32, kv_len=64),
        patch=_entry_of_amx,
        reading="what it misses lies in page",
    ),
)

SUBJECTS = tuple(plant.planted() for plant in PLANTS)
