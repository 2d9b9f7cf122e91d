"""Owns the meaning of scaled dot-product attention, and of the mask of a padded, ragged batch."""

import math

import torch
from torch import Tensor

from references.banded_mask import Lengths, check_window, sees, token_counts


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    distance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention output and log-sum-exp in float64.

        g(h)    = h // (H / Hkv)                        the kv head of query head h
        s[i, j] = scale * <q[h, i], k[g(h), j]>
        s[i, j] = softcap * tanh(s[i, j] / softcap)     (if there is a softcap)
        s[i, j] = s[i, j] - alibi[h] * distance[i, j]   (if there are ALiBi slopes)
        Z[i]    = sum over visible j of exp(s[i, j])  + exp(sinks[h])   (if there are sinks)
        out[i]  = sum over visible j of exp(s[i, j]) / Z[i] * v[g(h), j]
        lse[i]  = ln Z[i]

    Shapes: q `[B, H, Lq, D]`, k `[B, Hkv, Lk, D]`, v `[B, Hkv, Lk, Dv]`, visible bool broadcastable
    to `[B, H, Lq, Lk]` (True = visible; None = all visible), sinks and alibi `[H]`, distance
    broadcastable to `[B, 1, Lq, Lk]`; out `[B, H, Lq, Dv]`, lse `[B, H, Lq]`. Both results are
    float64 whatever the inputs' dtype, and the inputs are read exactly.

    **Contract**

    - No mask is implied: causality, window and padding are in `visible`, from `banded_mask` or
      `visible_keys`. It selects, it is never added to the scores.
    - A `visible` of three axes is refused: `[B, Lq, Lk]` would broadcast its batch against the
      heads.
    - Consecutive query heads share a kv head (`repeat_interleave`), not alternating ones
      (`repeat`).
    - `scale` defaults to 1 / sqrt(D), the head size of q and k, not of v; it is applied once,
      before the softcap.
    - The softcap is applied before the mask, so a hidden key has weight 0, not exp(-softcap). There
      is no "0 means none": `softcap=None` is none.
    - A sink is one more key with value 0. Its logit is taken as it is: not scaled, not capped,
      never masked. It counts in lse. `-inf` is no sink.
    - ALiBi (Press, Smith and Lewis 2022, "Train Short, Test Long") has a slope per query head, not
      per kv head, added after the softcap and before the mask: neither scaled nor capped. The sink
      has no position and gets no bias.
    - `distance` is the query's position minus the key's, from `distances`; left out, that of the
      last Lq of Lk tokens. It keeps its sign: without causality a key of the future is raised.
      (flash-attention takes -slope * |distance|; with a causal mask the two are one.)
    - BLOOM, Falcon and MPT add slope * (key's position), up to a constant of the row the same: the
      weights and `out` are equal, and where something stands beside the keys (a sink, the lse that
      a merge reads) they are not. Here it is the distance. Falcon scales the bias too: here its
      slopes are the published ones times the scale.
    - A row that sees no key (dead row) is zeros; its lse is -inf, or the sink where there is one.
      (mx.fast, and HF eager with its finite mask value, give the mean of V.)
    - What stands in a hidden slot never matters: NaN, inf and huge values in K or V there reach
      nothing. In a visible slot they propagate as IEEE arithmetic has it.
    - lse is a natural logarithm of the scaled, capped, masked scores.
    - Lk == 0 is allowed (all rows dead), and so is Lq == 0.

    Raises:
        ValueError: shapes that do not fit together, a mask that is not bool, a softcap that is not
        positive, distances without slopes.
    """
    _check(q, k, v, visible, softcap, sinks)
    _check_alibi(q, k, alibi, distance)
    batch, heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale

    group = heads // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    scores = scale * (q.double() @ k.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        if distance is None:
            distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
        scores = scores - alibi.double()[:, None, None] * distance.double()
    seen = torch.ones((), dtype=torch.bool) if visible is None else visible
    seen = seen.broadcast_to(scores.shape)
    scores = scores.masked_fill(~seen, -math.inf)

    # The sink is one more column, -inf where there is none: no row is empty, even at Lk == 0.
    sink = torch.full((heads,), -math.inf).double() if sinks is None else sinks.double()
    logits = torch.cat([scores, sink[:, None, None].expand(batch, heads, q_len, 1)], dim=-1)
    top = logits.amax(dim=-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(dim=-1, keepdim=True)

    out = _weighted_sum(weights[..., :kv_len], v, seen) / total.masked_fill(total == 0, 1.0)
    return out, (top + torch.log(total)).squeeze(-1)


def visible_keys(
    q_lens: Lengths,
    kv_lens: Lengths,
    q_len: int,
    kv_len: int,
    *,
    causal: bool,
    window: int | None = None,
    side: str = "right",
) -> Tensor:
    """Which keys each query of a padded, ragged batch sees: bool `[B, q_len, kv_len]`.

    Request b has `q_lens[b]` of the `q_len` rows and `kv_lens[b]` of the `kv_len` keys; the rest is
    padding, which stands on `side`: "right" (valid first) or "left" (valid last), for queries and
    keys alike. Counted within the request,

        row i (of q_lens[b]) stands at position kv_lens[b] - q_lens[b] + i
        it sees key j (of kv_lens[b]) iff not causal, or sees(position, j, window)

    **Contract**

    - Lower-right alignment inside each request: its last query sees its last key. (Alignment by the
      padded lengths, or upper-left, differs as soon as a request is shorter than the padded shape.)
    - q_lens[b] > kv_lens[b] is allowed: the first rows stand at negative positions and are dead.
    - Padded rows see nothing; padded keys are seen by nothing. Zero lengths are allowed.
    - A window counts keys of the request, W of them, the query's own included; it needs `causal`,
      because the engines do not agree on what a window without it shows.

    Raises:
        ValueError: a length out of range, unequal numbers of requests, a window without `causal`,
        or a
            `side` that is neither "right" nor "left".
    """
    check_window(window)
    if window is not None and not causal:
        raise ValueError(
            f"window={window} needs causal=True: a window without it has no agreed meaning"
        )
    rows, keys, row, key = _positions(q_lens, kv_lens, q_len, kv_len, side)
    valid = (row >= 0) & (row < rows) & (key >= 0) & (key < keys)
    return valid & sees(keys - rows + row, key, window) if causal else valid


def distances(
    q_lens: Lengths, kv_lens: Lengths, q_len: int, kv_len: int, *, side: str = "right"
) -> Tensor:
    """Position of each query minus that of each key in a padded, ragged batch: int64 `[B, Lq, Lk]`.

    Positions are those of `visible_keys`, counted within the request: they begin at its own first
    key, wherever that stands, and its last query stands on its last key. What a padded slot gets
    has no meaning.

    Raises:
        ValueError: as `visible_keys`.
    """
    rows, keys, row, key = _positions(q_lens, kv_lens, q_len, kv_len, side)
    return keys - rows + row - key


def alibi_slopes(heads: int, bias_max: float = 8.0) -> Tensor:
    """The published ALiBi slopes `[heads]`, float64: 2^(-bias_max i / n) for heads i = 1..n.

    That is for n a power of two. Else n is the next lower one, and the heads beyond it get the
    first, third, fifth, ... slope of 2 n heads (`get_slopes` of Press et al., transformers'
    `build_alibi_tensor`), not 2^(-bias_max i / heads). bias_max is 8 in the paper and in BLOOM,
    `alibi_bias_max` of MPT: the smallest slope is 2^-bias_max.

    Raises:
        ValueError: fewer than one head, or bias_max not positive.
    """
    if heads < 1 or not bias_max > 0:
        raise ValueError(f"heads={heads} must be at least 1, and bias_max={bias_max} positive")
    whole = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-bias_max * i / whole) for i in range(1, whole + 1)]
    between = [2.0 ** (-bias_max * i / (2 * whole)) for i in range(1, 2 * whole, 2)]
    return torch.tensor((series + between)[:heads], dtype=torch.float64)


def _positions(
    q_lens: Lengths, kv_lens: Lengths, q_len: int, kv_len: int, side: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries, keys) of each request, `[B, 1, 1]`; (row, key) within it, of each slot."""
    if side not in ("right", "left"):
        raise ValueError(
            f"side={side!r} must be 'right' or 'left': it says where the padding stands"
        )
    rows = token_counts("q_lens", q_lens, q_len)
    keys = token_counts("kv_lens", kv_lens, kv_len)
    if len(rows) != len(keys):
        raise ValueError(
            f"q_lens has {len(rows)} requests and kv_lens {len(keys)}: give both one per request"
        )
    rows, keys = rows[:, None, None], keys[:, None, None]
    row = torch.arange(q_len)[:, None] - (q_len - rows if side == "left" else 0)
    key = torch.arange(kv_len) - (kv_len - keys if side == "left" else 0)
    return rows, keys, row, key


def _weighted_sum(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """`weights @ v` over the seen keys: a weight of zero would make a hidden inf into NaN."""
    finite = v.isfinite()
    if bool(finite.all()):
        return weights @ v
    wild = ~finite.all(dim=-1).all(dim=1).all(dim=0)
    total = weights[..., ~wild] @ v[..., ~wild, :]
    for j in wild.nonzero().flatten().tolist():
        term = weights[..., j, None] * v[..., None, j, :]
        total = total + term.masked_fill(~seen[..., j, None], 0.0)
    return total


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected 4 axes: "
                "pass [batch, heads, length, head_dim]"
            )
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if k.shape != (batch, kv_heads, kv_len, head_dim):
        raise ValueError(
            f"k has shape {tuple(k.shape)}, q {tuple(q.shape)}: batch and head_dim must be equal"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}: all but head_dim must be equal"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads on {kv_heads} kv heads: pass a multiple of the kv heads"
        )
    if visible is not None:
        if visible.dtype != torch.bool:
            raise ValueError(
                f"visible has dtype {visible.dtype}, expected torch.bool: "
                "True is visible, nothing is added"
            )
        full = (batch, heads, q_len, kv_len)
        fits = all(
            a in (1, b) for a, b in zip(reversed(visible.shape), reversed(full), strict=False)
        )
        if visible.ndim not in (2, 4) or not fits:
            raise ValueError(
                f"visible has shape {tuple(visible.shape)}, expected {full} or (Lq, Lk), or 1 in "
                "place of a size: give a mask per request its head axis, mask[:, None]"
            )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be positive: pass None for no softcap")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}, expected ({heads},): "
            "pass one logit per query head"
        )


def _check_alibi(q: Tensor, k: Tensor, alibi: Tensor | None, distance: Tensor | None) -> None:
    batch, heads, q_len = q.shape[:3]
    if alibi is not None and alibi.shape != (heads,):
        raise ValueError(
            f"alibi has shape {tuple(alibi.shape)}, expected ({heads},): "
            "pass one slope per query head, as alibi_slopes makes them"
        )
    if distance is None:
        return
    if alibi is None:
        raise ValueError("distance without alibi: pass the slopes that it is multiplied with")
    full = (batch, 1, q_len, k.shape[2])
    sizes = zip(reversed(distance.shape), reversed(full), strict=False)
    if distance.ndim not in (2, 4) or not all(a in (1, b) for a, b in sizes):
        raise ValueError(
            f"distance has shape {tuple(distance.shape)}, expected {full} or (Lq, Lk), or 1 in "
            "place of a size: give distances per request a head axis, distances(...)[:, None]"
        )
