"""Owns latent attention for MLX: paged cache write, decode, extend, and the merge of splits."""

from typing import Any

import mlx.core as mx

from harness.engines.native.arguments.mla import check_cache, check_lengths, check_rows


def write_cache(cache: mx.array, latent: mx.array, k_pe: mx.array, slots: mx.array) -> mx.array:
    """The cache with each token's row [latent, k_pe] in its slot.

    cache `[pages, page_size, L + R]`, latent `[T, L]`, k_pe `[T, R]` (rotated), slots int `[T]`:
    page * page_size + offset, distinct. A token with a negative slot (padding) is not written.
    Values are copied, converted where dtypes differ. Assign the result where the cache was; MLX
    reuses its memory when nothing else refers to it.

    Raises:
        ValueError: shapes that do not fit together.
    """
    check_rows(cache.shape, latent.shape, k_pe.shape, slots.shape)
    if slots.size == 0:
        return cache
    # A token that is not kept writes what the first kept one writes, and what is there already
    # where none is kept.
    kept = slots >= 0
    token = mx.where(kept, mx.arange(slots.size), mx.argmax(kept))
    slot = mx.maximum(slots[token], 0)
    flat = cache.reshape(-1, cache.shape[-1])
    rows = mx.concatenate([latent, k_pe], axis=-1)[token].astype(cache.dtype)
    flat[slot] = mx.where(mx.any(kept), rows, flat[slot])
    return flat.reshape(cache.shape)


def absorb(q_nope: mx.array, w_uk: mx.array) -> mx.array:
    """q_latent `[T, H, L]` of q_nope `[T, H, nope]` and w_uk `[H, nope, L]`, in q's dtype.

    One batched product: accumulated in fp32 in any order, rounded once.
    """
    return (q_nope.swapaxes(0, 1) @ w_uk).swapaxes(0, 1)


def project_out(o_latent: mx.array, w_uv: mx.array) -> mx.array:
    """out `[T, H, v]` of o_latent `[T, H, L]` and w_uv `[H, L, v]`; as `absorb`."""
    return (o_latent.swapaxes(0, 1) @ w_uv).swapaxes(0, 1)


def decode(
    q_latent: mx.array,
    q_pe: mx.array,
    cache: mx.array,
    table: mx.array,
    kv_lens: mx.array,
    *,
    scale: float,
    splits: int = 1,
) -> tuple[mx.array, mx.array]:
    """One new token of each of B requests against its latent rows, its own row written already.

    q_latent `[B, H, L]`, q_pe `[B, H, R]`, cache `[pages, page_size, L + R]`, table int `[B, n]`
    (the pages of each request in the order of its tokens), kv_lens int `[B]` (rows, the new one
    included; 0 is allowed). scale: that of the materialised heads, mscale squared included.
    splits: the keys are cut into so many parts that are attended one after the other and merged.

    Returns o_latent `[B, H, L]` in q's dtype and lse `[B, H]`, natural log, fp32. A request without
    rows gives zeros and -inf. Nothing past kv_lens reaches a result, NaN included; table entries
    past a request's pages are not followed.

    **Arithmetic**, in fp32, on inputs that are widened exactly; per part:

        s = (sum over L + R columns of q_i k_i) * scale   any order; two more roundings
        m = max s;  p = exp(s - m);  z = sum p
        o = (sum_j p_j c_j) / z                           not rounded to q's dtype
        lse = log(z) + m

    then `merge` (for one part: nothing), and one rounding to q's dtype.

    Raises:
        ValueError: shapes that do not fit together, or splits < 1.
    """
    check_cache(q_latent.shape, q_pe.shape, cache.shape, table.shape, splits)
    check_lengths(table.shape, kv_lens.shape)
    query = mx.concatenate([q_latent, q_pe], axis=-1).astype(mx.float32)
    latent, page_size = q_latent.shape[-1], cache.shape[1]
    longest = max([1, *_ints(kv_lens)])
    part = -(-longest // splits)
    lens = kv_lens[:, None]
    outs, lses = [], []
    for start in range(0, longest, part):
        token = mx.arange(start, min(start + part, longest))[None]
        held = token < lens  # [B, part]
        # A slot past the end is read from the first page of the cache and then erased.
        at = mx.where(held, token, 0)
        page = mx.where(held, mx.take_along_axis(table, at // page_size, axis=1), 0)
        rows = mx.where(held[..., None], cache[page, at % page_size].astype(mx.float32), 0.0)
        scores = (query @ rows.swapaxes(1, 2)) * scale
        out, lse = _softmax_values(scores, rows[..., :latent], held[:, None])
        outs.append(out)
        lses.append(lse)
    out, lse = merge(outs, lses)
    return out.astype(q_latent.dtype), lse


def extend(
    q_latent: mx.array,
    q_pe: mx.array,
    cache: mx.array,
    table: mx.array,
    q_lens: list[int],
    kv_lens: list[int],
    *,
    scale: float,
    splits: int = 1,
) -> tuple[mx.array, mx.array]:
    """New tokens of a ragged batch against cached prefix and themselves, causal lower-right.

    q_latent `[T, H, L]` and q_pe `[T, H, R]`: the q_lens[0] new tokens of request 0, those of
    request 1, ...; rows past sum(q_lens) are padding and come back as zeros and -inf. kv_lens: rows
    of each request, the new ones included, which are written already: token i of request b sees
    the first kv_lens[b] - q_lens[b] + i + 1. Zero new tokens, or a prefix of zero, are allowed. All
    else, the arithmetic too, as in `decode`; parts are cut request by request.

    Raises:
        ValueError: shapes that do not fit together, more new tokens than rows, or splits < 1.
    """
    check_cache(q_latent.shape, q_pe.shape, cache.shape, table.shape, splits)
    check_lengths(table.shape, (len(kv_lens),), q_lens, kv_lens, tokens=q_latent.shape[0])
    latent, page_size = q_latent.shape[-1], cache.shape[1]
    tokens, heads = q_latent.shape[:2]
    found, found_lse, start = [], [], 0
    for request, (count, length) in enumerate(zip(q_lens, kv_lens, strict=True)):
        mine = slice(start, start + count)
        start += count
        if count == 0:
            continue
        query = mx.concatenate([q_latent[mine], q_pe[mine]], axis=-1)
        query = query.astype(mx.float32).swapaxes(0, 1)
        position = mx.arange(length - count, length)[:, None]
        part = -(-length // splits)
        outs, lses = [], []
        for first in range(0, length, part):
            token = mx.arange(first, min(first + part, length))
            rows = cache[table[request, token // page_size], token % page_size].astype(mx.float32)
            scores = (query @ rows.T) * scale
            out, lse = _softmax_values(scores, rows[:, :latent], token <= position)
            outs.append(out)
            lses.append(lse)
        out, lse = merge(outs, lses)
        found.append(out.swapaxes(0, 1).astype(q_latent.dtype))
        found_lse.append(lse.swapaxes(0, 1))
    padding = tokens - start
    found.append(mx.zeros((padding, heads, latent), dtype=q_latent.dtype))
    found_lse.append(mx.full((padding, heads), -mx.inf))
    return mx.concatenate(found), mx.concatenate(found_lse)


def merge(outs: list[mx.array], lses: list[mx.array]) -> tuple[mx.array, mx.array]:
    """Attention over all keys from attention over disjoint parts of them.

    outs: `[..., D]` each, normalised; lses: `[...]` each, natural log. A part with lse -inf is
    empty and counts nothing, whatever its out holds. All empty: zeros and -inf.

        lse = log(sum_s exp(lse_s - top)) + top,   top = max lse_s
        out = (sum_s exp(lse_s - top) out_s) / (sum_s exp(lse_s - top))

    Each operation is rounded in the dtype of the parts. One part is returned as it is.

    Raises:
        ValueError: no part, or not one lse for each.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"{len(outs)} outs and {len(lses)} lses: pass one of each per part")
    if len(outs) == 1:
        return outs[0], lses[0]
    lse = mx.stack(lses)
    top = lse.max(axis=0)
    top = mx.where(top == -mx.inf, 0.0, top)
    weight = mx.exp(lse - top)
    total = weight.sum(axis=0)
    kept = mx.where((lse == -mx.inf)[..., None], 0.0, mx.stack(outs))
    out = (weight[..., None] * kept).sum(axis=0) / mx.where(total == 0, 1.0, total)[..., None]
    return out, mx.log(total) + top


def _ints(x: mx.array) -> list[int]:
    found: Any = x.tolist()
    return found


def _softmax_values(
    scores: mx.array, values: mx.array, seen: mx.array
) -> tuple[mx.array, mx.array]:
    """Normalised output and lse of one part; rows that see nothing are zero and -inf."""
    scores = mx.where(seen, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    top = mx.where(top == -mx.inf, 0.0, top)
    weight = mx.exp(scores - top)
    total = weight.sum(axis=-1, keepdims=True)
    out = (weight @ values) / mx.where(total == 0, 1.0, total)
    return out, (mx.log(total) + top).squeeze(-1)
