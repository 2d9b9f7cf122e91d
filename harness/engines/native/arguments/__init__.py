"""Owns the refusal of attention arguments that no kernel of this package can mean; no framework."""

from collections.abc import Sequence

Shape = Sequence[int]


def check_band(n: int, offset: int, window: int | None) -> None:
    """Refuse a mask without rows, or with keys before the first.

    Raises:
        ValueError: n < 1, offset < 0 or window < 1.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1: pass the number of new tokens")
    if offset < 0:
        raise ValueError(f"offset={offset} must be at least 0: pass the number of cached tokens")
    check_window(window, causal=True)


def check_window(window: int | None, *, causal: bool) -> None:
    """Refuse a window that shows no key, and one whose right side nothing bounds.

    Raises:
        ValueError: window < 1, or a window without `causal`.
    """
    if window is not None and window < 1:
        raise ValueError(
            f"window={window} must be at least 1: it counts the query's own key; "
            "pass None for no window"
        )
    if window is not None and not causal:
        raise ValueError(f"window={window} needs causal=True: pass window=None for all keys")


def check_counts(name: str, counts: Sequence[int], batch: int | None, most: int) -> None:
    """Refuse token counts that are not one per request, each within 0 .. `most`.

    Raises:
        ValueError: the wrong number of counts, or one out of range.
    """
    if batch is not None and len(counts) != batch:
        raise ValueError(f"{name} has {len(counts)} counts, expected {batch}: pass one per request")
    for request, count in enumerate(counts):
        if not 0 <= count <= most:
            raise ValueError(
                f"{name}[{request}]={count} must be in 0..{most}: "
                f"it counts tokens of a row of {most}"
            )


def check_side(side: str) -> None:
    """Refuse a side that is neither.

    Raises:
        ValueError: side is not "right" or "left".
    """
    if side not in ("right", "left"):
        raise ValueError(f"side={side!r} must be 'right' or 'left': it says where padding stands")


def check_attention(
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    softcap: float | None,
    sinks: Shape | None,
    alibi: Shape | None = None,
) -> None:
    """Refuse shapes that do not fit together, and a softcap that caps nothing.

    Raises:
        ValueError: see above; shapes are `[batch, heads, length, head_dim]`, sinks and alibi
            `[heads]`.
    """
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, expected 4 axes: "
                "pass [batch, heads, length, head_dim]"
            )
    if k[0] != q[0] or k[3] != q[3]:
        raise ValueError(
            f"k has shape {tuple(k)}, q {tuple(q)}: batch and head_dim must be equal; "
            "pass k as [batch, kv_heads, kv_len, head_dim]"
        )
    if tuple(v[:3]) != tuple(k[:3]):
        raise ValueError(
            f"v has shape {tuple(v)}, k {tuple(k)}: batch, kv_heads and kv_len must be equal"
        )
    if k[1] == 0 or q[1] % k[1]:
        raise ValueError(
            f"{q[1]} query heads on {k[1]} kv heads: pass q with a multiple of the kv heads"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be positive: pass None for no softcap")
    if sinks is not None and tuple(sinks) != (q[1],):
        raise ValueError(
            f"sinks has shape {tuple(sinks)}, expected ({q[1]},): pass one logit per query head"
        )
    if alibi is not None and tuple(alibi) != (q[1],):
        raise ValueError(
            f"alibi has shape {tuple(alibi)}, expected ({q[1]},): pass one slope per query head"
        )


def check_caches(keys: Sequence[Shape], values: Sequence[Shape], batch: int) -> None:
    """Refuse caches that are not one `[kv_heads, length, head_dim]` of keys and values per request.

    Raises:
        ValueError: the wrong number of caches, or shapes that do not fit together.
    """
    if len(keys) != batch or len(values) != batch:
        raise ValueError(
            f"{len(keys)} key and {len(values)} value caches for {batch} queries: "
            "pass one of each per request"
        )
    for request, (k, v) in enumerate(zip(keys, values, strict=True)):
        if len(k) != 3 or len(v) != 3 or tuple(k[:2]) != tuple(v[:2]):
            raise ValueError(
                f"request {request}: keys have shape {tuple(k)}, values {tuple(v)}: "
                "pass [kv_heads, length, head_dim], of equal kv_heads and length"
            )
