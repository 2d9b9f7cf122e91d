"""Owns the meaning of a causal, windowed, padded attention mask: which key each query may see."""

from collections.abc import Sequence

import torch
from torch import Tensor

Lengths = Sequence[int] | Tensor


def sees(position: Tensor, key: Tensor, window: int | None = None) -> Tensor:
    """`key <= position and (no window or key > position - window)`, elementwise, bool.

    The one predicate behind every mask of this package. `position` and `key` count tokens from the
    same origin; a window of W shows W keys, the query's own included.
    """
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


def banded_mask(
    n: int,
    offset: int = 0,
    *,
    window: int | None = None,
    left_padding: Lengths | None = None,
    right_padding: Lengths | None = None,
    keep: int = 0,
    chunk: int | None = None,
) -> Tensor:
    """Which of the `offset + n` keys each of the last `n` queries sees.

        visible[b, i, j] =     j <= offset + i
                           and j >  offset + i - window          (if there is a window)
                           and j >= left_padding[b]              (if there is left padding)
                           and j <  offset + n - right_padding[b] (if there is right padding)
                           and (j - left_padding[b]) // chunk
                               == (offset + i - left_padding[b]) // chunk  (if there are chunks)

    With `keep`, the second line reads `j < keep or j > offset + i - (window - keep)`.

    Shapes: bool `[n, offset + n]`, or `[batch, n, offset + n]` when a padding is given. There is no
    head axis; paddings are one token count per request, `[batch]`.

    **Contract**

    - True means visible (torch SDPA, mlx), not masked (`torch.nn.MultiheadAttention`).
    - `offset` tokens are cached; query row i stands at position `offset + i`, so the last row sees
      the last key: lower-right alignment. (torch's `is_causal` is upper-left: row i sees keys
      0..i.)
    - A window of W shows W keys, the query's own included: `window=1` is the diagonal, a window of
      at least `offset + n` is none. (flash-attn's left size and vLLM's Triton `(W - 1, 0)` do not
      count the query.)
    - n == 1 is no exception: a single query after many cached tokens is still windowed.
    - Positions are slots of the padded row. Padding takes slots, it does not shift positions, so a
      window reaches over `window` slots, padding among them.
    - Left padding hides keys; the rows that stand in it then see nothing (dead rows, all False).
      Right padding hides keys too; the rows that stand in it still see the valid keys within their
      window, and are dead only where the window has left all of those behind.
    - Both paddings may be given; together they may cover the whole row.
    - `keep` first slots are never left behind by the window and count as part of it: with keep=K a
      late query sees the first K slots and the last W - K, its own included (attention sinks in the
      cache of StreamingLLM, arXiv:2309.17453; mlx_lm's `RotatingKVCache(keep)`).
    - A query sees only its own chunk of `chunk` slots (Llama 4). Chunks are counted from the
      request's first valid slot.
    - Keys are absolute slots 0 .. offset + n - 1; a rotating cache's slots must be put in order
      first.

    Raises:
        ValueError: n, offset, window, keep, chunk or a padding is out of range, or the paddings
        differ in length.
    """
    if n < 1:
        raise ValueError(
            f"n={n} must be at least 1: a mask needs a query row; pass the number of new tokens"
        )
    if offset < 0:
        raise ValueError(f"offset={offset} must be at least 0: pass the number of cached tokens")
    check_window(window)
    if keep and (window is None or not 0 < keep < window):
        raise ValueError(
            f"keep={keep} must be in 1..window - 1, got window={window}: it counts the first slots "
            "that stay in the window; pass 0 for none"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1: pass None for no chunks")
    length = offset + n
    key, position = torch.arange(length), torch.arange(offset, length)[:, None]
    visible = sees(position, key, window - keep if window and keep else window)
    visible = visible | (sees(position, key) & (key < keep))

    left = None if left_padding is None else token_counts("left_padding", left_padding, length)
    right = None if right_padding is None else token_counts("right_padding", right_padding, length)
    if left is not None and right is not None and len(left) != len(right):
        raise ValueError(
            f"left_padding has {len(left)} requests and right_padding {len(right)}: "
            "give both one count per request"
        )
    if left is not None:
        visible = visible & (key >= left[:, None, None])
    if chunk is not None:
        first = 0 if left is None else left[:, None, None]
        visible = visible & ((key - first) // chunk == (position - first) // chunk)
    if right is not None:
        visible = visible & (key < length - right[:, None, None])
    return visible


def check_window(window: int | None) -> None:
    """Refuse a window that shows no key at all."""
    if window is not None and window < 1:
        raise ValueError(
            f"window={window} must be at least 1: it counts the query's own key; "
            "pass None for no window"
        )


def token_counts(name: str, counts: Lengths, most: int) -> Tensor:
    """`counts` as an int64 tensor `[batch]`, each within 0 .. `most`."""
    given = torch.as_tensor(counts)
    if (
        given.ndim != 1
        or given.is_floating_point()
        or given.is_complex()
        or given.dtype == torch.bool
    ):
        raise ValueError(
            f"{name}={counts!r} must be a 1-D sequence of integers: "
            "give one token count per request"
        )
    given = given.to("cpu", torch.int64)
    for request, count in enumerate(given.tolist()):
        if not 0 <= count <= most:
            raise ValueError(
                f"{name}[{request}]={count} must be in 0..{most}: "
                f"it counts tokens of a row of {most}"
            )
    return given
