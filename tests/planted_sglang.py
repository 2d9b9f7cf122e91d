"""Bugs of the seed reports, planted into sglang's own code from outside, in its worker.

SUBJECTS are the ordinary subjects of `harness.engines.sglang`, each with one part of sglang
replaced while it answers. Read in both processes: sglang is imported where a subject runs.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from cases import yarn
from cases.banded_mask import BandedMaskCase
from cases.sdpa import SdpaCase
from tests.planting import Patch, Plant


def _window_ignored_alone() -> Any:
    from sglang.srt.hardware_backend.mlx.kv_cache import attention_kv_cache as caches

    right = caches.make_attention_mask

    def wrong(N: int, offset: int, return_array: bool = False, window_size: Any = None) -> Any:
        return None if N == 1 else right(N, offset, return_array, window_size)

    return mock.patch.object(caches, "make_attention_mask", wrong)


def _sinks_dropped() -> Any:
    from sglang.srt.hardware_backend.mlx.kv_cache.attention_wrapper import MLXAttentionWrapper

    right = MLXAttentionWrapper._batched_decode

    def wrong(self: Any, x: Any, ctx: Any) -> Any:
        object.__setattr__(self, "_sink_kwargs", {})
        return right(self, x, ctx)

    return mock.patch.object(MLXAttentionWrapper, "_batched_decode", wrong)


def _window_dropped_in_decode() -> Any:
    from sglang.srt.hardware_backend.mlx.kv_cache.attention_wrapper import MLXAttentionWrapper

    right = MLXAttentionWrapper.__init__

    def wrong(self: Any, inner: Any, layer_idx: int, window_size: Any = None) -> None:
        del window_size
        right(self, inner, layer_idx)

    return mock.patch.object(MLXAttentionWrapper, "__init__", wrong)


def _full_padding() -> Any:
    from sglang.srt.hardware_backend.mlx.kv_cache.attention_wrapper import BatchedDecodeContext

    right = BatchedDecodeContext.decode_padding

    def wrong(self: Any, window: int | None) -> Any:
        pads, keep = right(self, window)
        if window is None or not self.needs_padding:
            return pads, keep
        width = max(min(n + 1, window) for n in self.seq_lens)
        return pads, right(self, None)[1][..., -width:]

    return mock.patch.object(BatchedDecodeContext, "decode_padding", wrong)


def _upper_left() -> Any:
    import torch
    from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPAImpl

    def wrong(self: Any, query: Any, key: Any, value: Any, attn_metadata: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2)

    return mock.patch.object(SDPAImpl, "forward", wrong)


def _translated(change: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]) -> Patch:
    """change: (rope dict of the config, sglang's) to what is returned instead."""

    def patch() -> Any:
        from sglang.srt.configs import laguna

        right = laguna._to_sglang_rope_scaling

        def wrong(rope: dict[str, Any]) -> Any:
            out = right(rope)
            return change(rope, out) if out and "attn_factor" in out else out

        return mock.patch.object(laguna, "_to_sglang_rope_scaling", wrong)

    return patch


def _kept(rope: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
    return out | {name: rope[name] for name in ("mscale", "mscale_all_dim") if name in rope}


def _gate_open() -> Any:
    from sglang.srt.hardware_backend.mlx import aot

    def wrong(inputs: Any) -> Any:
        rope = inputs.sample_attn.rope
        return aot.MlxAOTRoPEKernel(
            base=float(getattr(rope, "base", 10000.0)),
            config={
                "head_dim": inputs.head_dim,
                "num_qo_heads": inputs.sample_attn.n_heads,
                "num_kv_heads": inputs.n_kv_heads,
            },
            rope_pool_fused=aot._load_metal_rope_pool_fused(),
        )

    return mock.patch.object(aot, "_build_rope_kernel", wrong)


def _truncate_ignored() -> Any:
    from sglang.srt.layers.rotary_embedding import yarn as theirs

    right = theirs.yarn_find_correction_range

    def wrong(*args: Any) -> Any:
        return right(*args[:5])

    return mock.patch.object(theirs, "yarn_find_correction_range", wrong)


_ATTENTION = SdpaCase(
    dtype="float32", seed=1, values="normal", batch=1, q_len=1, kv_len=7, heads=2, kv_heads=1,
    head_dim=16, causal=True,
)  # fmt: skip
_ROPES = dict(yarn.PINNED)
PLANTS = (
    Plant(
        name="window ignored when N == 1",
        subject="sglang.banded_mask.contiguous",
        faults=("window-ignored", "window-ignored-in-decode"),
        telling=BandedMaskCase(dtype="float32", seed=1, n=1, offset=20, window=4),
        patch=_window_ignored_alone,
    ),
    Plant(
        name="sinks dropped in batched decode",
        subject="sglang.sdpa.mlx_gpt_oss",
        faults=("sink-dropped",),
        telling=replace(_ATTENTION, sinks=0.0),
        patch=_sinks_dropped,
    ),
    Plant(
        name="window dropped in batched decode",
        subject="sglang.sdpa.mlx_gpt_oss_contiguous",
        faults=(
            "window-ignored",
            "window-plus-one",
        ),
        telling=replace(_ATTENTION, kv_len=12, window=4),
        patch=_window_dropped_in_decode,
    ),
    Plant(
        name="full-length padding reused for windowed layers",
        subject="sglang.sdpa.mlx_gpt_oss",
        faults=("window-padded-by-full-lengths",),
        telling=replace(_ATTENTION, batch=2, kv_len=12, kv_lens=(12, 10), window=4),
        patch=_full_padding,
    ),
    Plant(
        name="is_causal where lower-right was meant",
        subject="sglang.sdpa.multimodal",
        faults=("upper-left",),
        telling=replace(_ATTENTION, q_len=3),
        patch=_upper_left,
    ),
    Plant(
        name="attention_factor passed straight through",
        subject="sglang.yarn.laguna",
        faults=("attention-factor-as-multiplier", "mscale-twice"),
        telling=_ROPES["laguna-s-factor-128"],
        patch=_translated(lambda rope, out: out | {"attn_factor": rope["attention_factor"]}),
    ),
    Plant(
        name="attn_factor = 1.0",
        subject="sglang.yarn.laguna",
        faults=("attention-factor-ignored",),
        telling=_ROPES["laguna-attention-factor-1.1"],
        patch=_translated(lambda rope, out: out | {"attn_factor": 1.0}),
    ),
    Plant(
        name="mscale and mscale_all_dim kept beside attention_factor",
        subject="sglang.yarn.laguna",
        faults=("mscale-kept-beside-attention-factor",),
        telling=replace(_ROPES["laguna-attention-factor-1.1"], mscale=1.0, mscale_all_dim=0.707),
        patch=_translated(_kept),
    ),
    Plant(
        name="truncate ignored",
        subject="sglang.yarn.direct",
        faults=("truncate-ignored",),
        telling=_ROPES["gpt-oss-20b"],
        patch=_truncate_ignored,
    ),
    Plant(
        name="scaled rope accepted by the AOT gate",
        subject="sglang.yarn.mlx_decode",
        faults=(
            "scaling-dropped",
            "rope-dict-not-read",
        ),
        telling=_ROPES["qwen-2.5-7b-yarn"],
        patch=_gate_open,
    ),
)

SUBJECTS = tuple(plant.planted() for plant in PLANTS)
