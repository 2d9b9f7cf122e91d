"""Owns latent attention for torch: paged cache write, decode, extend, and the merge of splits."""

import torch
from torch import Tensor

from harness.engines.native.arguments.mla import check_cache, check_lengths, check_rows


def split_weights(kv_b: Tensor, heads: int, nope_dim: int) -> tuple[Tensor, Tensor]:
    """W_UK `[H, nope, L]` and W_UV `[H, L, v]` of a checkpoint's `kv_b_proj.weight`.

    kv_b `[H * (nope + v), L]`: head by head, first the rows that make keys, then those that make
    values. Both results are views; `absorb` and `project_out` take any strides.

    Raises:
        ValueError: kv_b has no such rows.
    """
    if kv_b.ndim != 2 or kv_b.shape[0] % heads or kv_b.shape[0] // heads <= nope_dim:
        raise ValueError(
            f"kv_b has shape {tuple(kv_b.shape)}, expected [{heads} * ({nope_dim} + v_dim), latent]"
        )
    per_head = kv_b.unflatten(0, (heads, -1))
    return per_head[:, :nope_dim], per_head[:, nope_dim:].mT


def write_cache(cache: Tensor, latent: Tensor, k_pe: Tensor, slots: Tensor) -> None:
    """Write each token's row [latent, k_pe] to its slot of a paged cache, in place.

    cache `[pages, page_size, L + R]` (rows contiguous, pages of any stride), latent `[T, L]`, k_pe
    `[T, R]` (rotated), slots int64 `[T]`: page * page_size + offset, distinct. A token with a
    negative slot (padding) is not written. Values are copied, converted where dtypes differ.

    Raises:
        ValueError: shapes that do not fit together.
    """
    check_rows(cache.shape, latent.shape, k_pe.shape, slots.shape)
    if len(slots) == 0:
        return
    # No indexing by a mask, whose size the host would have to wait for: a token that is not kept
    # writes what the first kept one writes, and what is there already where none is kept.
    kept = slots >= 0
    token = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.int().argmax())
    slot, page_size = slots[token].clamp_min(0), cache.shape[1]
    page, offset = slot // page_size, slot % page_size
    rows = torch.cat([latent, k_pe], dim=-1)[token].to(cache.dtype)
    cache[page, offset] = torch.where(kept.any(), rows, cache[page, offset])


def absorb(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """q_latent `[T, H, L]` of q_nope `[T, H, nope]` and w_uk `[H, nope, L]`, in q's dtype.

    One batched product: accumulated in fp32 in any order, rounded once.
    """
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def project_out(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """out `[T, H, v]` of o_latent `[T, H, L]` and w_uv `[H, L, v]`; as `absorb`."""
    return torch.bmm(o_latent.transpose(0, 1), w_uv).transpose(0, 1)


def decode(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    table: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """One new token of each of B requests against its latent rows, its own row written already.

    q_latent `[B, H, L]`, q_pe `[B, H, R]`, cache `[pages, page_size, L + R]`, table int `[B, n]`
    (the pages of each request in the order of its tokens), kv_lens int `[B]` (rows, the new one
    included; 0 is allowed). scale: that of the materialised heads, mscale squared included.
    splits: the keys are cut into so many parts, of whole rows, that are attended one after the
    other and merged; a request with fewer keys than that has empty ones.

    Returns o_latent `[B, H, L]` in q's dtype and lse `[B, H]`, natural log, fp32. A request without
    rows gives zeros and -inf. Nothing past kv_lens reaches a result, NaN included; table entries
    past a request's pages are not followed.

    **Arithmetic**, in C = fp32 (fp64 for fp64), on inputs that are widened exactly; per part:

        s = (sum over L + R columns of q_i k_i) * scale   sum in C, any order; two more roundings
        m = max s;  p = exp(s - m);  z = sum p            each in C
        o = (sum_j p_j c_j) / z                           in C, not rounded to q's dtype
        lse = log(z) + m                                  in C

    then `merge` (for one part: nothing), and one rounding to q's dtype. On CUDA this holds with
    `torch.backends.cuda.matmul.allow_tf32 = False`, torch's default.

    Raises:
        ValueError: shapes that do not fit together, or splits < 1.
    """
    check_cache(q_latent.shape, q_pe.shape, cache.shape, table.shape, splits)
    check_lengths(table.shape, kv_lens.shape)
    wide = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    query = torch.cat([q_latent, q_pe], dim=-1).to(wide)
    latent, page_size = q_latent.shape[-1], cache.shape[1]
    longest = int(kv_lens.max()) if len(kv_lens) else 0
    part = max(1, -(-longest // splits))
    lens = kv_lens[:, None]
    outs, lses = [], []
    for start in range(0, max(longest, 1), part):
        token = torch.arange(start, min(start + part, max(longest, 1)), device=cache.device)
        held = token < lens  # [B, part]
        # A slot past the end is read from the request's first page and then erased.
        at = torch.where(held, token, 0)
        page = torch.where(held, table.gather(1, at // page_size), 0)
        rows = cache[page, at % page_size].to(wide).masked_fill(~held[..., None], 0.0)
        scores = (query @ rows.mT) * scale
        out, lse = _softmax_values(scores, rows[..., :latent], held[:, None])
        outs.append(out)
        lses.append(lse)
    out, lse = merge(outs, lses)
    return out.to(q_latent.dtype), lse


def extend(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    table: Tensor,
    q_lens: list[int],
    kv_lens: list[int],
    *,
    scale: float,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
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
    check_lengths(table.shape, (len(kv_lens),), q_lens, kv_lens, tokens=len(q_latent))
    wide = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    latent, page_size = q_latent.shape[-1], cache.shape[1]
    o_latent = torch.zeros_like(q_latent)
    all_lse = torch.full(q_latent.shape[:2], -torch.inf, dtype=wide, device=q_latent.device)
    start = 0
    for request, (count, length) in enumerate(zip(q_lens, kv_lens, strict=True)):
        mine = slice(start, start + count)
        start += count
        if count == 0:
            continue
        query = torch.cat([q_latent[mine], q_pe[mine]], dim=-1).to(wide).transpose(0, 1)
        position = torch.arange(length - count, length, device=cache.device)[:, None]
        part = -(-length // splits)
        outs, lses = [], []
        for first in range(0, length, part):
            token = torch.arange(first, min(first + part, length), device=cache.device)
            rows = cache[table[request, token // page_size], token % page_size].to(wide)
            scores = (query @ rows.mT) * scale
            out, lse = _softmax_values(scores, rows[:, :latent], token <= position)
            outs.append(out)
            lses.append(lse)
        out, lse = merge(outs, lses)
        o_latent[mine] = out.transpose(0, 1).to(q_latent.dtype)
        all_lse[mine] = lse.transpose(0, 1)
    return o_latent, all_lse


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
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
    lse = torch.stack(lses)
    top = lse.amax(dim=0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = torch.exp(lse - top)
    total = weight.sum(dim=0)
    kept = torch.stack(outs).masked_fill((lse == -torch.inf)[..., None], 0.0)
    out = (weight[..., None] * kept).sum(dim=0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, torch.log(total) + top


def _softmax_values(scores: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised output and lse of one part; rows that see nothing are zero and -inf."""
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = torch.exp(scores - top)
    total = weight.sum(dim=-1, keepdim=True)
    out = (weight @ values) / total.masked_fill(total == 0, 1.0)
    return out, (torch.log(total) + top).squeeze(-1)
