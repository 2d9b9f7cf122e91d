"""Owns attention for MLX: lower-right, windowed, ragged, with softcap, sinks and log-sum-exp."""

import math
from collections.abc import Sequence
from typing import Literal, overload

import mlx.core as mx

from harness.engines.native.arguments import (
    check_attention,
    check_caches,
    check_side,
    check_window,
)
from harness.engines.native.mlx.banded_mask import Counts, banded_mask, ragged_mask

ROWS = 256
"""Queries per block of the plain path: bounds its scores to `ROWS * kv_len` per head."""


@overload
def lower_right_sdpa(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    causal: bool = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: mx.array | None = ...,
    scale: float | None = ...,
    q_lens: Counts | None = ...,
    kv_lens: Counts | None = ...,
    side: str = ...,
    return_lse: Literal[False] = ...,
    path: Literal["auto", "fused", "plain"] = ...,
) -> mx.array: ...
@overload
def lower_right_sdpa(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    causal: bool = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: mx.array | None = ...,
    scale: float | None = ...,
    q_lens: Counts | None = ...,
    kv_lens: Counts | None = ...,
    side: str = ...,
    return_lse: Literal[True],
    path: Literal["auto", "fused", "plain"] = ...,
) -> tuple[mx.array, mx.array]: ...
def lower_right_sdpa(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    scale: float | None = None,
    q_lens: Counts | None = None,
    kv_lens: Counts | None = None,
    side: str = "right",
    return_lse: bool = False,
    path: Literal["auto", "fused", "plain"] = "auto",
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention in which the last query sees the last key, whatever the two lengths.

    q `[B, H, Lq, D]`, k `[B, Hkv, Lk, D]`, v `[B, Hkv, Lk, Dv]`, H a multiple of Hkv (query head h
    uses kv head `h // (H / Hkv)`); fp16, bf16, fp32, and fp64 on the CPU.

    causal: query i sees keys up to position `Lk - Lq + i`. window: only the last so many of those,
        its own included. With q_lens or kv_lens (`[B]`, tokens), each request is aligned by its own
        lengths and its padding, on `side`, is neither read into a result nor given one.
    scale: of the scores, 1 / sqrt(D) if None. softcap: `softcap * tanh(score / softcap)`, after the
        scale, before the mask. sinks `[H]`: logits of one more key, of value 0, neither scaled nor
        capped.
    return_lse: also the natural log of the softmax denominator, sink included, `[B, H, Lq]`.

    A row that sees no key is zero; its lse is -inf, or the sink.

    **Paths.** "fused" is `mx.fast.scaled_dot_product_attention`: MLX's arithmetic, by its backend.
    "plain" is ours, and does everything. "auto" takes fused unless softcap, lse, or sinks of
    another dtype than q's (mx.fast takes no others) ask for plain.

    **Arithmetic of plain**, in C = fp32 (fp64 for fp64 inputs), on inputs that are widened exactly:

        s = (sum_d q_d k_d) * scale    products and sums in C, any order; two roundings follow
                                       from the scale: of the number to C, of the product
        s = tanh(s / softcap) * softcap             each operation rounded to C
        m = max(visible s, sink)                    exact
        p = exp(s - m), exp(sink - m)               the difference rounded to C; MLX's own exp
        z = sum p                                   in C, any order
        out = (sum_j p_j v_j) / z                   P stays in C and unnormalised; sum in C, any
                                                    order; one division; one rounding to q's dtype
        lse = log(z) + m                            in C, and stays there

    MLX's exp and tanh are its backend's; on the CPU exp errs by up to `1.8 + 0.8 |x|` units of
    2^-24 and is 0 below -88.

    Raises:
        ValueError: shapes that do not fit, window or softcap out of range, lengths out of range, or
            path="fused" with a feature that only plain has.
    """
    check_attention(
        q.shape, k.shape, v.shape, softcap=softcap, sinks=None if sinks is None else sinks.shape
    )
    check_window(window, causal=causal)
    check_side(side)
    plain_only = softcap is not None or return_lse or (sinks is not None and sinks.dtype != q.dtype)
    if path == "fused" and plain_only:
        raise ValueError(
            f"path='fused' has no softcap, no lse, and sinks of q's dtype={q.dtype} only: "
            "pass path='auto' or 'plain'"
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
        # What stands in padding may be large enough for a score of inf or NaN, which a kernel
        # that adds its mask can't hide. Nor does 0 * inf vanish in V.
        assert visible is not None
        shown = visible.any(axis=-2)[..., None]
        k = mx.where(shown, k, mx.array(0, k.dtype))
        v = mx.where(shown, v, mx.array(0, v.dtype))

    if plain_only or path == "plain":
        out, lse = _plain(q, k, v, visible, scale, softcap, sinks)
        return (out, lse) if return_lse else out
    return _fused(q, k, v, visible, scale, sinks)


def ragged_decode(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    scale: float | None = None,
    path: Literal["auto", "fused", "plain"] = "auto",
) -> mx.array:
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
    check_caches([x.shape for x in keys], [x.shape for x in values], q.shape[0])
    n = q.shape[2]
    if window is not None:
        start = [max(0, x.shape[1] - (window + n - 1)) for x in keys]
        keys = [x[:, at:] for x, at in zip(keys, start, strict=True)]
        values = [x[:, at:] for x, at in zip(values, start, strict=True)]
    lengths = [x.shape[1] for x in keys]
    longest = max(lengths)
    k, v = (
        mx.stack([mx.pad(x, [(0, 0), (longest - x.shape[1], 0), (0, 0)]) for x in caches])
        for caches in (keys, values)
    )
    return lower_right_sdpa(
        q,
        k,
        v,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        # A request of fewer than n tokens has fewer than n queries, its last ones.
        q_lens=[min(n, length) for length in lengths],
        kv_lens=lengths,
        side="left",
        path=path,
    )


def _mask(
    q: mx.array,
    k: mx.array,
    causal: bool,
    window: int | None,
    q_lens: Counts | None,
    kv_lens: Counts | None,
    side: str,
) -> mx.array | None:
    """Visible keys, broadcastable to `[B, 1, Lq, Lk]`, or None where all are."""
    q_len, kv_len = q.shape[2], k.shape[2]
    if q_lens is not None or kv_lens is not None:
        return ragged_mask(
            q_lens,
            kv_lens,
            q_len,
            kv_len,
            batch=q.shape[0],
            causal=causal,
            window=window,
            side=side,
        )
    windowed = window is not None and window < kv_len
    if not causal or q_len == 0 or (q_len == 1 and not windowed):
        return None
    if q_len <= kv_len:
        return banded_mask(q_len, kv_len - q_len, window=window)
    # More queries than keys: the first ones stand before the first key.
    before = mx.zeros((q_len - kv_len, kv_len), dtype=mx.bool_)
    if kv_len == 0:
        return before
    return mx.concatenate([before, banded_mask(kv_len, window=window)])


def _fused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    visible: mx.array | None,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    if k.shape[2] == 0 or q.shape[2] == 0:
        return mx.zeros((*q.shape[:3], v.shape[-1]), dtype=q.dtype)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=visible, sinks=sinks)
    if visible is None:
        return out
    # mx.fast gives a row without a key the mean of V; a padded row's query may hold anything.
    return mx.where(visible.any(axis=-1, keepdims=True), out, mx.array(0, out.dtype))


def _plain(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    visible: mx.array | None,
    scale: float,
    softcap: float | None,
    sinks: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Output in q's dtype and lse in the accumulation dtype, a block of rows at a time."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    wide = mx.float64 if q.dtype == mx.float64 else mx.float32
    if k.shape[2] == 0 or q_len == 0:
        empty = mx.full((batch, heads, q_len), -math.inf, dtype=wide)
        lse = empty if sinks is None else mx.maximum(empty, sinks.astype(wide)[:, None])
        return mx.zeros((batch, heads, q_len, v.shape[-1]), dtype=q.dtype), lse
    # Query heads of a kv head side by side: K and V are read where they are, not repeated.
    grouped = q.reshape(batch, kv_heads, group, q_len, head_dim).astype(wide)
    k, v = k.astype(wide)[:, :, None], v.astype(wide)[:, :, None]
    sink = None if sinks is None else sinks.astype(wide).reshape(kv_heads, group, 1, 1)

    outs, lses = [], []
    for start in range(0, q_len, ROWS):
        rows = slice(start, start + ROWS)
        scores = (grouped[:, :, :, rows] @ k.swapaxes(-1, -2)) * scale
        if softcap is not None:
            scores = mx.tanh(scores / softcap) * softcap
        if visible is not None:
            seen = visible[..., rows, :]
            seen = seen[:, :, None] if seen.ndim == 4 else seen
            scores = mx.where(seen, scores, mx.array(-math.inf, wide))
        top = scores.max(axis=-1, keepdims=True)
        if sink is not None:
            top = mx.maximum(top, sink)
        # 0 for a row that has no logit, so that exp(-inf - top) is 0.
        top = mx.where(top == -math.inf, mx.array(0, wide), top)
        p = mx.exp(scores - top)
        total = p.sum(axis=-1, keepdims=True)
        if sink is not None:
            total = total + mx.exp(sink - top)
        outs.append((p @ v) / mx.where(total == 0, mx.array(1, wide), total))
        lses.append((mx.log(total) + top).squeeze(-1))
    out = mx.concatenate(outs, axis=3).reshape(batch, heads, q_len, v.shape[-1])
    return out.astype(q.dtype), mx.concatenate(lses, axis=3).reshape(batch, heads, q_len)
