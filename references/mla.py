"""Owns the meaning of latent attention: cache write, absorb, attend, merge, project out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.sdpa import sdpa

Lengths = Sequence[int] | Tensor


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Every stage of the absorbed path, float64; T tokens, H heads, L latent columns.

    q_latent, o_latent: `[T, H, L]`. out: `[T, H, V]`. lse: `[T, H]`, natural log.
    """

    q_latent: Tensor
    o_latent: Tensor
    lse: Tensor
    out: Tensor


def write_cache(cache: Tensor, latent: Tensor, k_pe: Tensor, slots: Tensor) -> Tensor:
    """The cache after `row[slots[t]] = [latent[t], k_pe[t]]` for every t with slots[t] >= 0.

    Shapes: cache `[pages, page_size, L + R]`, latent `[T, L]`, k_pe `[T, R]`, slots `[T]` (int64).
    Returns a new tensor of cache's dtype; the inputs are not touched.

    **Contract**

    - A slot counts rows of the whole cache: page * page_size + offset, in rows, not in bytes.
    - Two sources, one row: the latent in the first L columns, the rotated key part in the last R.
      (The other order has the same width, and only the scores can tell.)
    - A negative slot marks a token that is not to be kept (padding): nothing is written for it,
      not in the last row either, where a negative index of Python would go.
    - Nothing but the named rows changes. Bits are copied, so NaN payloads and -0 survive.
    - Two tokens of one call never have the same slot.

    Raises:
        ValueError: shapes that do not fit together, a slot past the end, or one named twice.
    """
    pages, page_size, width = cache.shape
    if latent.shape[1] + k_pe.shape[1] != width or len(latent) != len(k_pe):
        raise ValueError(
            f"latent has shape {tuple(latent.shape)} and k_pe {tuple(k_pe.shape)}, expected rows "
            f"of {width} columns together: pass [tokens, L] and [tokens, R]"
        )
    kept = slots[slots >= 0]
    if len(slots) != len(latent) or (len(kept) and int(kept.max()) >= pages * page_size):
        raise ValueError(
            f"slots={slots.tolist()} must name one of {pages * page_size} rows for each of "
            f"{len(latent)} tokens, or be negative"
        )
    if len(kept.unique()) != len(kept):
        raise ValueError(f"slots={slots.tolist()} name a row twice: which token stays is not said")
    rows = cache.clone().reshape(pages * page_size, width)
    rows[kept] = torch.cat([latent, k_pe], -1)[slots >= 0].to(cache.dtype)
    return rows.reshape(cache.shape)


def gather_rows(cache: Tensor, table: Tensor, kv_len: int) -> Tensor:
    """The first `kv_len` rows of a request, oldest first: `[kv_len, L + R]`, cache's dtype.

    table `[n]`: its pages in the order of its tokens. Token j lies in page `table[j // page_size]`
    at `j % page_size`. Entries past the last page in use are never read, nor are rows of the last
    page past `kv_len`.
    """
    page_size = cache.shape[1]
    token = torch.arange(kv_len)
    return cache[table[token // page_size].long(), token % page_size]


def absorb(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """q_latent[t, h] = q_nope[t, h] @ w_uk[h]: `[T, H, N]` and `[H, N, L]` to `[T, H, L]`, float64.

    <q_nope, w_uk c> = <q_nope w_uk, c>: the up-projection of the keys moves to the query.
    """
    return (q_nope.double().transpose(0, 1) @ w_uk.double()).transpose(0, 1)


def project_out(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """out[t, h] = o_latent[t, h] @ w_uv[h]: `[T, H, L]` and `[H, L, V]` to `[T, H, V]`, float64."""
    return (o_latent.double().transpose(0, 1) @ w_uv.double()).transpose(0, 1)


def attend(
    q_latent: Tensor, q_pe: Tensor, rows: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one request over its latent rows: (o_latent `[T, H, L]`, lse `[T, H]`).

    One key head for all H query heads: key j is the whole row, value j its first L columns.

    Shapes: q_latent `[T, H, L]`, q_pe `[T, H, R]`, rows `[K, L + R]`, visible bool `[T, K]`.
    """
    latent = q_latent.shape[-1]
    query = torch.cat([q_latent.double(), q_pe.double()], -1).transpose(0, 1)[None]
    key = rows.double()[None, None]
    out, lse = sdpa(query, key, key[..., :latent], visible=visible, scale=scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def attend_materialised(
    q_nope: Tensor,
    q_pe: Tensor,
    rows: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    visible: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same attention with keys and values of every head written out: (out `[T, H, V]`, lse).

    key[h, j] = [w_uk[h] c_j, k_pe_j], value[h, j] = c_j w_uv[h], c_j the first L columns of row j.
    """
    latent = w_uk.shape[-1]
    c, k_pe = rows[:, :latent].double(), rows[:, latent:].double()
    heads = q_nope.shape[1]
    query = torch.cat([q_nope.double(), q_pe.double()], -1).transpose(0, 1)[None]
    key = torch.cat([c @ w_uk.double().mT, k_pe.expand(heads, *k_pe.shape)], -1)[None]
    out, lse = sdpa(query, key, (c @ w_uv.double())[None], visible=visible, scale=scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over disjoint parts of them, float64.

        lse = ln sum_s exp(lses[s])     out = sum_s exp(lses[s] - lse) outs[s]

    Shapes: outs `[S, ..., D]`, lses `[S, ...]`; results `[..., D]` and `[...]`.

    **Contract**

    - lse is a natural logarithm. (FlashInfer's kernels return base 2.)
    - A part without a visible key has lse -inf; its out counts nothing, whatever it holds: NaN too.
    - All parts without a key: out is zero, lse -inf.
    """
    outs, lses = outs.double(), lses.double()
    empty = lses == -torch.inf
    top = lses.amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    outs = outs.masked_fill(empty[..., None], 0.0)
    out = (weights[..., None] * outs).sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, top + torch.log(total)


def causal(q_len: int, kv_len: int) -> Tensor:
    """bool `[q_len, kv_len]`: new token i, at position kv_len - q_len + i, sees keys up to its own.

    Lower-right: the newest token sees every key, its own included.
    """
    return torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None]


def mla(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    table: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    q_lens: Lengths,
    kv_lens: Lengths,
    scale: float,
    visible: Sequence[Tensor] | None = None,
    q_latent: Tensor | None = None,
    o_latent: Tensor | None = None,
) -> Latent:
    """Latent attention of a packed, ragged batch over a paged cache, by the absorbed path.

        c_j, k_pe_j = the row of token j             (`gather_rows`)
        s[h, i, j]  = scale * (<q_nope[h, i], w_uk[h] c_j> + <q_pe[h, i], k_pe_j>)
        out[h, i]   = sum over visible j of softmax(s)[h, i, j] * c_j w_uv[h]

    Shapes: q_nope `[T, H, N]`, q_pe `[T, H, R]`, cache `[pages, page_size, L + R]` (new tokens
    written already), table `[B, n]`, w_uk `[H, N, L]`, w_uv `[H, L, V]`, q_lens and kv_lens `[B]`.
    Request b has the rows `sum(q_lens[:b])` and on of the T; kv_lens counts its new tokens too.

    **Contract**

    - Absorbed and materialised mean the same: `attend` then `project_out` equals
      `attend_materialised`, and `scale` is that of the materialised heads, 1 / sqrt(N + R) times
      mscale squared where a model has YaRN. Absorption does not make it 1 / sqrt(L + R).
    - q_pe and k_pe are rotated already; the latent is normalised already.
    - Causal, lower-right in each request (`causal`), or as `visible` says: per request a bool
      `[q_lens[b], kv_lens[b]]`. Decode is q_lens[b] == 1; a cached prefix is kv_lens > q_lens.
    - Stepwise equals full: chunks of a prompt, each written before it attends, give the rows that
      the whole prompt gives.
    - q_lens[b] == 0 and kv_lens[b] == 0 are allowed. Rows of the T past sum(q_lens) are padding:
      zeros come back for them.
    - Rows of the cache that no visible token names do not matter, NaN included.
    - q_latent, o_latent: given, they are taken for the outcome of their stage, and the later ones
      start from them: that is how a stage is judged on a subject's own input to it.

    Raises:
        ValueError: more new tokens than keys in a request, or than rows.
    """
    queries, keys = _ints(q_lens), _ints(kv_lens)
    tokens = len(q_nope)
    if sum(queries) > tokens or any(n > k for n, k in zip(queries, keys, strict=True)):
        raise ValueError(
            f"q_lens={queries} must fit {tokens} rows, and each kv_lens={keys} count the new "
            "tokens too: write them to the cache first"
        )
    absorbed = absorb(q_nope, w_uk) if q_latent is None else q_latent.double()
    attended = torch.zeros_like(absorbed)
    lse = torch.full(absorbed.shape[:2], -torch.inf, dtype=torch.float64)
    start = 0
    for request, (n, length) in enumerate(zip(queries, keys, strict=True)):
        mine = slice(start, start + n)
        rows = gather_rows(cache, table[request], length)
        seen = causal(n, length) if visible is None else visible[request]
        if n:
            attended[mine], lse[mine] = attend(absorbed[mine], q_pe[mine], rows, seen, scale)
        start += n
    start_from = attended if o_latent is None else o_latent.double()
    return Latent(q_latent=absorbed, o_latent=attended, lse=lse, out=project_out(start_from, w_uv))


def _ints(lengths: Lengths) -> list[int]:
    return [int(n) for n in lengths]
