"""Owns attention masks for MLX: causal lower-right bands, padding, and padded ragged batches."""

from collections.abc import Sequence

import mlx.core as mx

from harness.engines.native.arguments import check_band, check_counts, check_side, check_window

Counts = Sequence[int] | mx.array
"""Tokens per request, `[batch]`. An array is trusted: a check would force its evaluation."""


def banded_mask(
    n: int,
    offset: int = 0,
    *,
    window: int | None = None,
    left_padding: Counts | None = None,
    right_padding: Counts | None = None,
) -> mx.array:
    """Which of the `offset + n` keys each of the `n` new tokens sees; True is visible.

    Row i stands at position `offset + i` and sees key j iff `j <= offset + i`, and with a window W
    `j > offset + i - W` (W keys, its own included; also for n == 1), and j is no padding. Positions
    are slots: padding shifts nothing.

    Returns bool `[n, offset + n]`, or `[batch, 1, n, offset + n]` with a padding: the 1 is the head
    axis, so that the mask goes to `mx.fast.scaled_dot_product_attention` as it is.

    Raises:
        ValueError: n < 1, offset < 0, window < 1, or a padding that is no count of slots.
    """
    check_band(n, offset, window)
    length = offset + n
    key = mx.arange(length)
    visible = _band(key[offset:, None], key, window)
    if left_padding is not None:
        left = _counts("left_padding", left_padding, None, length)
        visible = visible & (key >= left)
    if right_padding is not None:
        right = _counts("right_padding", right_padding, None, length)
        if left_padding is not None and len(right) != len(left_padding):
            check_counts("right_padding", [0] * len(right), len(left_padding), length)
        visible = visible & (key < length - right)
    return visible


def ragged_mask(
    q_lens: Counts | None,
    kv_lens: Counts | None,
    q_len: int,
    kv_len: int,
    *,
    batch: int,
    causal: bool = True,
    window: int | None = None,
    side: str = "right",
) -> mx.array:
    """Which keys each query of a padded batch sees: bool `[batch, 1, q_len, kv_len]`.

    Request b has `q_lens[b]` queries and `kv_lens[b]` keys (None: all); padding stands on `side` of
    them. Alignment is lower-right inside each request: its last query sees its last key. Padded
    queries see nothing, and so do the first queries of a request with more queries than keys.

    Raises:
        ValueError: counts out of range, window < 1 or without `causal`, an unknown side.
    """
    check_window(window, causal=causal)
    check_side(side)
    rows = _counts("q_lens", [q_len] * batch if q_lens is None else q_lens, batch, q_len)
    keys = _counts("kv_lens", [kv_len] * batch if kv_lens is None else kv_lens, batch, kv_len)
    row = mx.arange(q_len)[:, None]
    key = mx.arange(kv_len)
    if side == "left":
        row = row - (q_len - rows)
        key = key - (kv_len - keys)
    valid = (row >= 0) & (row < rows) & (key >= 0) & (key < keys)
    return valid & _band(keys - rows + row, key, window) if causal else valid


def _band(position: mx.array, key: mx.array, window: int | None) -> mx.array:
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


def _counts(name: str, counts: Counts, batch: int | None, most: int) -> mx.array:
    """Counts as `[batch, 1, 1, 1]`, checked where that costs no evaluation."""
    if not isinstance(counts, mx.array):
        check_counts(name, counts, batch, most)
        counts = mx.array(list(counts), dtype=mx.int32)
    return counts.astype(mx.int32)[:, None, None, None]
