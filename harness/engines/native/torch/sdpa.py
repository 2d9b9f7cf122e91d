"""Owns attention for torch: lower-right, windowed, ragged, with softcap, sinks and log-sum-exp."""

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.engines.native.arguments import (
    check_attention,
    check_caches,
    check_side,
    check_window,
)
from harness.engines.native.torch.banded_mask import Counts, banded_mask, distances, ragged_mask

ROWS = 256
"""Queries per block of the plain path: bounds its scores to `ROWS * kv_len` per head."""


@overload
def lower_right_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    alibi: Tensor | None = ...,
    scale: float | None = ...,
    q_lens: Counts | None = ...,
    kv_lens: Counts | None = ...,
    side: str = ...,
    return_lse: Literal[False] = ...,
    path: Literal["auto", "fused", "plain"] = ...,
) -> Tensor: ...
@overload
def lower_right_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    alibi: Tensor | None = ...,
    scale: float | None = ...,
    q_lens: Counts | None = ...,
    kv_lens: Counts | None = ...,
    side: str = ...,
    return_lse: Literal[True],
    path: Literal["auto", "fused", "plain"] = ...,
) -> tuple[Tensor, Tensor]: ...
def lower_right_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    q_lens: Counts | None = None,
    kv_lens: Counts | None = None,
    side: str = "right",
    return_lse: bool = False,
    path: Literal["auto", "fused", "plain"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which the last query sees the last key, whatever the two lengths.

    q `[B, H, Lq, D]`, k `[B, Hkv, Lk, D]`, v `[B, Hkv, Lk, Dv]`, H a multiple of Hkv (query head h
    uses kv head `h // (H / Hkv)`), any strides; fp16, bf16, fp32 or fp64.

    causal: query i sees keys up to position `Lk - Lq + i`. window: only the last so many of those,
        its own included. With q_lens or kv_lens (`[B]`, tokens), each request is aligned by its own
        lengths and its padding, on `side`, is neither read into a result nor given one.
    scale: of the scores, 1 / sqrt(D) if None. softcap: `softcap * tanh(score / softcap)`, after the
        scale, before the mask. sinks `[H]`: logits of one more key, of value 0, neither scaled nor
        capped.
    alibi `[H]`: slopes; `-slope * (position of the query - position of the key)` joins the score
        after the softcap, positions as the causal rule counts them, within the request.
    return_lse: also the natural log of the softmax denominator, sink included, `[B, H, Lq]`.

    A row that sees no key is zero; its lse is -inf, or the sink.

    **Paths.** "fused" is `F.scaled_dot_product_attention`, with no mask, `is_causal` or a boolean
    mask: torch's arithmetic, by its backend. "plain" is ours, and does everything. "auto" takes
    fused unless softcap, sinks, ALiBi or lse ask for plain.

    **Arithmetic of plain**, in C = fp32 (fp64 for fp64 inputs), on inputs that are widened exactly:

        s = (sum_d q_d k_d) * scale    products and sums in C, any order; two roundings follow
                                       from the scale: of the number to C, of the product
        s = tanh(s / softcap) * softcap             each operation rounded to C (on CUDA, torch
                                                    divides by the rounded 1 / softcap)
        s = s - slope * distance                    the product and the difference rounded to C
        m = max(visible s, sink)                    exact
        p = exp(s - m), exp(sink - m)               the difference and exp rounded to C
        z = sum p                                   in C, any order
        out = (sum_j p_j v_j) / z                   P stays in C and unnormalised; sum in C, any
                                                    order; one division; one rounding to q's dtype
        lse = log(z) + m                            in C, and stays there

    On CUDA this holds with `torch.backends.cuda.matmul.allow_tf32 = False`, torch's default.

    Raises:
        ValueError: shapes that do not fit, window or softcap out of range, lengths out of range, or
            path="fused" with a feature that only plain has.
    """
    check_attention(
        q.shape,
        k.shape,
        v.shape,
        softcap=softcap,
        sinks=None if sinks is None else sinks.shape,
        alibi=None if alibi is None else alibi.shape,
    )
    check_window(window, causal=causal)
    check_side(side)
    plain_only = return_lse or any(x is not None for x in (softcap, sinks, alibi))
    if path == "fused" and plain_only:
        raise ValueError(
            "path='fused' has no softcap, sinks, ALiBi or lse: pass path='auto' or 'plain'"
        )
    if path not in ("auto", "fused", "plain"):
        raise ValueError(f"path={path!r} must be 'auto', 'fused' or 'plain'")

    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q_len = q.shape[2]
    if causal and window is not None and q_lens is None and kv_lens is None:
        # Keys that even the first row's window has left behind.
        first = max(0, k.shape[2] - q_len - window + 1)
        k, v = k[:, :, first:], v[:, :, first:]
    visible = _mask(q, k, causal, window, q_lens, kv_lens, side)
    if q_lens is not None or kv_lens is not None:
        # A fused kernel adds -inf to the score of a hidden key, and inf - inf is NaN: what stands
        # in padding may be large enough for that. Nor does 0 * inf vanish in V.
        assert visible is not None
        hidden = ~visible.any(dim=-2)[..., None]
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)

    if plain_only or path == "plain":
        bias = None
        if alibi is not None:
            apart = distances(
                q_lens, kv_lens, q_len, k.shape[2], batch=len(q), side=side, device=q.device
            )
            bias = alibi, apart
        out, lse = _plain(q, k, v, visible, scale, softcap, sinks, bias)
        return (out, lse) if return_lse else out
    return _fused(q, k, v, visible, scale)


def ragged_decode(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    path: Literal["auto", "fused", "plain"] = "auto",
) -> Tensor:
    """One decode step of a batch whose requests keep caches of their own, of unequal length.

    q `[B, H, n, D]`: the n newest tokens of each request (n = 1, or more when drafts are verified),
    which are in its cache already. keys[b] `[Hkv, length_b, D]`, values[b] `[Hkv, length_b, Dv]`,
    oldest first. Returns `[B, H, n, Dv]`. Other arguments, and the arithmetic, as in
    `lower_right_sdpa`.

    With a window, only the last `window + n - 1` keys of each cache are read: the oldest of the n
    queries needs `window` keys, and n - 1 newer ones follow. What is kept is padded on the left to
    the longest, so the batch costs `min(longest, window + n - 1)` keys per request, and the mask is
    made anew from the lengths kept, not from those of the caches.

    Raises:
        ValueError: not one cache per request, shapes that do not fit, window < 1.
    """
    check_window(window, causal=True)
    check_caches([x.shape for x in keys], [x.shape for x in values], len(q))
    n = q.shape[2]
    if window is not None:
        start = [max(0, x.shape[1] - (window + n - 1)) for x in keys]
        keys = [x[:, at:] for x, at in zip(keys, start, strict=True)]
        values = [x[:, at:] for x, at in zip(values, start, strict=True)]
    lengths = [x.shape[1] for x in keys]
    longest = max(lengths)
    k, v = (
        torch.stack([F.pad(x, (0, 0, longest - x.shape[1], 0)) for x in caches])
        for caches in (keys, values)
    )
    return lower_right_sdpa(
        q,
        k,
        v,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        scale=scale,
        # A request of fewer than n tokens has fewer than n queries, its last ones.
        q_lens=[min(n, length) for length in lengths],
        kv_lens=lengths,
        side="left",
        path=path,
    )


def _mask(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int | None,
    q_lens: Counts | None,
    kv_lens: Counts | None,
    side: str,
) -> Tensor | None:
    """Visible keys, broadcastable to `[B, 1, Lq, Lk]`, or None where all are."""
    q_len, kv_len = q.shape[2], k.shape[2]
    if q_lens is not None or kv_lens is not None:
        return ragged_mask(
            q_lens,
            kv_lens,
            q_len,
            kv_len,
            batch=len(q),
            causal=causal,
            window=window,
            side=side,
            device=q.device,
        )
    windowed = window is not None and window < kv_len
    if not causal or q_len == 0 or (q_len == 1 and not windowed):
        return None
    if q_len <= kv_len:
        return banded_mask(q_len, kv_len - q_len, window=window, device=q.device)
    # More queries than keys: the first ones stand before the first key.
    before = torch.zeros(q_len - kv_len, kv_len, dtype=torch.bool, device=q.device)
    if kv_len == 0:
        return before
    return torch.cat([before, banded_mask(kv_len, window=window, device=q.device)])


def _fused(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    if k.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    # With another stride along head_dim torch quietly leaves its fused kernels.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    # Backends differ on a row without a key; a padded row's query may hold anything.
    return out if visible is None else out.masked_fill(~visible.any(-1, keepdim=True), 0.0)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and lse in the accumulation dtype, a block of rows at a time.

    bias: slopes `[H]` and distances `[B, 1, Lq, Lk]`, multiplied block by block.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads = k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Query heads of a kv head side by side: K and V are read where they are, not repeated.
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, q_len, head_dim).to(wide)
    k, v = k.to(wide)[:, :, None], v.to(wide)[:, :, None]
    sink = None if sinks is None else sinks.to(wide).reshape(kv_heads, heads // kv_heads, 1, 1)

    outs, lses = [], []
    for start in range(0, max(q_len, 1), ROWS):
        rows = slice(start, start + ROWS)
        scores = (grouped[:, :, :, rows] @ k.mT) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            slopes, apart = bias
            slope = slopes.to(wide).reshape(kv_heads, heads // kv_heads, 1, 1)
            scores = scores - slope * apart[:, :, None, rows].to(wide)
        if visible is not None:
            seen = visible[..., rows, :]
            seen = seen[:, :, None] if seen.ndim == 4 else seen
            scores = scores.masked_fill(~seen, -math.inf)
        top = _top(scores, sink)
        p = torch.exp(scores - top)
        total = p.sum(dim=-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - top)
        outs.append((p @ v) / total.masked_fill(total == 0, 1.0))
        lses.append((torch.log(total) + top).squeeze(-1))
    out = torch.cat(outs, dim=3).reshape(batch, heads, q_len, v.shape[-1])
    return out.to(q.dtype), torch.cat(lses, dim=3).reshape(batch, heads, q_len)


def _top(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The largest logit of each row, 0 for a row that has none, so that exp(-inf - top) is 0."""
    if scores.shape[-1] == 0:
        top = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    else:
        top = scores.amax(dim=-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    return top.masked_fill(top == -math.inf, 0.0)
