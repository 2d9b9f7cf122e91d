"""Owns the refusal of latent attention arguments that no kernel of this package can mean."""

from collections.abc import Sequence

Shape = Sequence[int]


def check_rows(cache: Shape, latent: Shape, k_pe: Shape, slots: Shape) -> None:
    """Refuse rows that do not fill a row of the cache, and slots that are not one per token.

    Raises:
        ValueError: see above.
    """
    if len(cache) != 3 or len(latent) != 2 or len(k_pe) != 2:
        raise ValueError(
            f"cache has shape {tuple(cache)}, latent {tuple(latent)}, k_pe {tuple(k_pe)}: "
            "pass [pages, page_size, L + R], [tokens, L] and [tokens, R]"
        )
    if latent[0] != k_pe[0] or latent[1] + k_pe[1] != cache[2]:
        raise ValueError(
            f"latent {tuple(latent)} and k_pe {tuple(k_pe)} must have as many tokens, and "
            f"{cache[2]} columns together, as the cache has"
        )
    if tuple(slots) != (latent[0],):
        raise ValueError(
            f"slots has shape {tuple(slots)}, expected ({latent[0]},): pass one row of the cache "
            "per token, negative for padding"
        )


def check_cache(q_latent: Shape, q_pe: Shape, cache: Shape, table: Shape, splits: int) -> None:
    """Refuse queries that do not fit a row of the cache, a table without requests, and no part.

    Raises:
        ValueError: see above.
    """
    if len(q_latent) != 3 or len(q_pe) != 3 or tuple(q_latent[:2]) != tuple(q_pe[:2]):
        raise ValueError(
            f"q_latent has shape {tuple(q_latent)}, q_pe {tuple(q_pe)}: "
            "pass [tokens, heads, L] and [tokens, heads, R]"
        )
    if len(cache) != 3 or cache[2] != q_latent[2] + q_pe[2]:
        raise ValueError(
            f"cache has shape {tuple(cache)}, expected [pages, page_size, "
            f"{q_latent[2]} + {q_pe[2]}]: a row holds the latent and then the rotated part"
        )
    if len(table) != 2:
        raise ValueError(
            f"table has shape {tuple(table)}, expected 2 axes: pass [requests, pages per request]"
        )
    if splits < 1:
        raise ValueError(
            f"splits={splits} must be at least 1: pass 1 to attend to all keys at once"
        )


def check_lengths(
    table: Shape,
    kv_lens: Shape,
    q_counts: Sequence[int] = (),
    kv_counts: Sequence[int] = (),
    tokens: int = 0,
) -> None:
    """Refuse lengths that are not one per request, and requests with more new tokens than rows.

    Raises:
        ValueError: see above.
    """
    if tuple(kv_lens) != (table[0],):
        raise ValueError(
            f"kv_lens has shape {tuple(kv_lens)}, expected ({table[0]},): pass one per table row"
        )
    if not kv_counts:
        return
    if len(q_counts) != len(kv_counts) or sum(q_counts) > tokens:
        raise ValueError(
            f"q_lens={list(q_counts)} must give each of {len(kv_counts)} requests its part of "
            f"{tokens} tokens"
        )
    for request, (new, rows) in enumerate(zip(q_counts, kv_counts, strict=True)):
        if not 0 <= new <= rows:
            raise ValueError(
                f"q_lens[{request}]={new} must be in 0..{rows}, its kv_lens: write the new "
                "tokens to the cache first and count them"
            )
