"""Owns attention masks for torch: causal lower-right bands, padding, and padded ragged batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.engines.native.arguments import check_band, check_counts, check_side, check_window

Counts = Sequence[int] | Tensor
"""Tokens per request, `[batch]`. A tensor on a device is trusted: a check would wait for it."""


def banded_mask(
    n: int,
    offset: int = 0,
    *,
    window: int | None = None,
    left_padding: Counts | None = None,
    right_padding: Counts | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which of the `offset + n` keys each of the `n` new tokens sees; True is visible.

    Row i stands at position `offset + i` and sees key j iff `j <= offset + i`, and with a window W
    `j > offset + i - W` (W keys, its own included; also for n == 1), and j is no padding. Positions
    are slots: padding shifts nothing.

    Returns bool `[n, offset + n]`, or `[batch, 1, n, offset + n]` with a padding: the 1 is the head
    axis, so that the mask goes to `F.scaled_dot_product_attention` as it is.

    Raises:
        ValueError: n < 1, offset < 0, window < 1, or a padding that is no count of slots.
    """
    check_band(n, offset, window)
    length = offset + n
    key = torch.arange(length, device=device)
    visible = _band(key[offset:, None], key, window)
    if left_padding is not None:
        left = _counts("left_padding", left_padding, None, length, key.device)
        visible = visible & (key >= left)
    if right_padding is not None:
        right = _counts("right_padding", right_padding, None, length, key.device)
        if left_padding is not None and len(right) != len(left_padding):
            check_counts("right_padding", right.flatten().tolist(), len(left_padding), length)
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
    device: torch.device | str | None = None,
) -> Tensor:
    """Which keys each query of a padded batch sees: bool `[batch, 1, q_len, kv_len]`.

    Request b has `q_lens[b]` queries and `kv_lens[b]` keys (None: all); padding stands on `side` of
    them. Alignment is lower-right inside each request: its last query sees its last key. Padded
    queries see nothing, and so do the first queries of a request with more queries than keys.

    Raises:
        ValueError: counts out of range, window < 1 or without `causal`, an unknown side.
    """
    check_window(window, causal=causal)
    check_side(side)
    rows, keys, row, key = _positions(q_lens, kv_lens, q_len, kv_len, batch, side, device)
    valid = (row >= 0) & (row < rows) & (key >= 0) & (key < keys)
    return valid & _band(keys - rows + row, key, window) if causal else valid


def distances(
    q_lens: Counts | None,
    kv_lens: Counts | None,
    q_len: int,
    kv_len: int,
    *,
    batch: int,
    side: str = "right",
    device: torch.device | str | None = None,
) -> Tensor:
    """Position of each query minus that of each key, as `ragged_mask` counts: int64, of its shape.

    Raises:
        ValueError: counts out of range, an unknown side.
    """
    check_side(side)
    rows, keys, row, key = _positions(q_lens, kv_lens, q_len, kv_len, batch, side, device)
    return keys - rows + row - key


def _positions(
    q_lens: Counts | None,
    kv_lens: Counts | None,
    q_len: int,
    kv_len: int,
    batch: int,
    side: str,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries, keys) of each request, `[batch, 1, 1, 1]`; (row, key) within it, of each slot."""
    device = torch.device("cpu") if device is None else torch.device(device)
    rows = _counts("q_lens", [q_len] * batch if q_lens is None else q_lens, batch, q_len, device)
    keys = _counts(
        "kv_lens", [kv_len] * batch if kv_lens is None else kv_lens, batch, kv_len, device
    )
    row = torch.arange(q_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)
    if side == "left":
        row = row - (q_len - rows)
        key = key - (kv_len - keys)
    return rows, keys, row, key


def _band(position: Tensor, key: Tensor, window: int | None) -> Tensor:
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


def _counts(
    name: str, counts: Counts, batch: int | None, most: int, device: torch.device
) -> Tensor:
    """Counts as `[batch, 1, 1, 1]` on `device`, checked where that costs no wait."""
    if not isinstance(counts, Tensor):
        check_counts(name, counts, batch, most)
        counts = torch.tensor(list(counts), dtype=torch.int64)
    elif counts.device.type == "cpu":
        check_counts(name, counts.tolist(), batch, most)
    return counts.to(device, torch.int64)[:, None, None, None]
