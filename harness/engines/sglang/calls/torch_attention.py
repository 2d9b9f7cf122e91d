"""sglang's attention on torch: SDPAImpl of its diffusion runtime, and its server's backend."""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPAImpl
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from cases import values
from cases.sdpa import SdpaCase
from harness.subject import Tensors

RESERVED = 1
"""Slot 0 of a pool takes the keys of padded tokens; page size 1."""


def multimodal(case: SdpaCase, t: Tensors) -> Tensors:
    """SDPAImpl, call by call with all keys that the cache holds by then."""
    attention = SDPAImpl(
        num_heads=case.heads,
        head_size=case.head_dim,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        num_kv_heads=case.kv_heads,
    )
    outs = [
        attention.forward(
            t["q"][:, :, start:stop].transpose(1, 2),
            t["k"][:, :, :keys].transpose(1, 2),
            t["v"][:, :, :keys].transpose(1, 2),
            None,
        )
        for start, stop, keys in case.steps()
    ]
    return {"out": torch.cat(outs, 1).transpose(1, 2)}


def torch_native(case: SdpaCase, t: Tensors) -> Tensors:
    """TorchNativeAttnBackend over the server's pools: extend by chunks, and decode by tokens.

    Keys lie in slots of no order, between slots of poison. The keys before the first query are in
    the pool already, as those of a cached prefix are.
    """
    requests, outs, start = _Requests(case, t), [], 0
    for step in case.schedule or (case.q_len,):
        outs.append(requests.step(start, start + step))
        start += step
    return {"out": torch.cat(outs, 1).transpose(1, 2)}


class _Requests:
    """The server's pools with the cached keys of every request, and a layer that reads them."""

    def __init__(self, case: SdpaCase, t: Tensors) -> None:
        self.case, self.t = case, t
        self.lens = case.kv_lens or (case.kv_len,) * case.batch
        slots, dtype = sum(self.lens), t["q"].dtype
        self.pool = MHATokenToKVPool(
            size=2 * slots, page_size=RESERVED, dtype=dtype, head_num=case.kv_heads,
            head_dim=case.head_dim, layer_num=1, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.fill_(values.poison(case.dtype))
        rows = ReqToTokenPool(case.batch, max(self.lens), "cpu", enable_memory_saver=False)
        order = values.integers(case.seed, "slots", (2 * slots,), 0, 2**31 - 1).argsort()
        self.slots = (order[:slots] + RESERVED).split(list(self.lens))
        for b, mine in enumerate(self.slots):
            rows.write((b + 1, slice(0, len(mine))), mine.int())
            first = self.lens[b] - case.q_len
            k, v = self._keys(b, 0, first)
            self.pool.k_buffer[0][mine[:first]], self.pool.v_buffer[0][mine[:first]] = k, v
        self.backend = TorchNativeAttnBackend(
            SimpleNamespace(device="cpu", req_to_token_pool=rows, token_to_kv_pool=self.pool)
        )
        self.layer = RadixAttention(
            case.heads, case.head_dim, case.softmax_scale, case.kv_heads, layer_id=0,
            logit_cap=case.softcap or 0.0,
            sliding_window_size=-1 if case.window is None else case.window - 1,
        )  # fmt: skip

    def step(self, start: int, stop: int) -> torch.Tensor:
        """Output `[batch, queries, heads, head_dim]` of queries start:stop of each request."""
        case, size = self.case, stop - start
        ends = [length - case.q_len + stop for length in self.lens]
        news = [self._keys(b, end - size, end) for b, end in enumerate(ends)]
        k, v = (torch.cat(parts) for parts in zip(*news, strict=True))
        batch = SimpleNamespace(
            out_cache_loc=torch.cat(
                [self.slots[b][end - size : end] for b, end in enumerate(ends)]
            ),
            req_pool_indices=torch.arange(1, case.batch + 1),
            seq_lens=torch.tensor(ends),
            extend_prefix_lens=torch.tensor(ends) - size,
            extend_seq_lens=torch.tensor([size] * case.batch),
            encoder_lens=None,
        )
        self.backend.init_forward_metadata(batch)
        decode = bool(case.schedule) and size == 1
        forward = self.backend.forward_decode if decode else self.backend.forward_extend
        q = self.t["q"][:, :, start:stop].transpose(1, 2).flatten(0, 1)
        out = forward(q.flatten(1), k, v, self.layer, batch)
        return out.reshape(case.batch, size, case.heads, case.head_dim)

    def _keys(self, b: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v `[tokens, kv_heads, head_dim]` of a request's own tokens start:stop."""
        shift = self.case.kv_len - self.lens[b] if self.case.side == "left" else 0
        at = slice(start + shift, stop + shift)
        return self.t["k"][b, :, at].transpose(0, 1), self.t["v"][b, :, at].transpose(0, 1)
