"""Owns the witness for masks: transformers' mask functions, put together by its own `sdpa_mask`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils


def mask_function(*, causal: bool, window: int | None) -> Callable[..., Any]:
    """The function that transformers' models of that kind of layer use."""
    if not causal:
        return masking_utils.bidirectional_mask_function
    if window is None:
        return masking_utils.causal_mask_function
    return masking_utils.sliding_window_causal_mask_function(window)


def banded_mask(
    n: int,
    offset: int = 0,
    *,
    window: int | None = None,
    left_padding: Sequence[int] | Tensor | None = None,
    right_padding: Sequence[int] | Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """As `references.banded_mask.banded_mask`: bool `[n, offset + n]`, or `[batch, ...]` if padded.

    Its `keep` has no counterpart in transformers.

    Padding goes the way a tokenizer's `attention_mask` goes: a 2-D mask `[batch, offset + n]` of
    the tokens seen so far.
    """
    length = offset + n
    attention_mask = None
    slot = torch.arange(length)
    if left_padding is not None:
        attention_mask = slot >= torch.as_tensor(left_padding)[:, None]
    if right_padding is not None:
        on_right = slot < length - torch.as_tensor(right_padding)[:, None]
        attention_mask = on_right if attention_mask is None else attention_mask & on_right
    function = mask_function(causal=True, window=window)
    if chunk is not None:
        first = torch.as_tensor([0] if left_padding is None else left_padding)
        if len(first) == 1 and attention_mask is not None:
            first = first.expand(len(attention_mask))
        chunks = masking_utils.chunked_causal_mask_function(chunk, first)
        function = masking_utils.and_masks(function, chunks)
    visible = masking_utils.sdpa_mask(
        batch_size=1 if attention_mask is None else len(attention_mask),
        q_length=n,
        kv_length=length,
        q_offset=offset,
        mask_function=function,
        attention_mask=attention_mask,
        # A skipped mask is a promise about the kernel that runs next, not a mask.
        allow_is_causal_skip=False,
    )
    assert visible is not None
    return visible[0, 0] if attention_mask is None else visible[:, 0]


def visible_keys(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    q_len: int,
    kv_len: int,
    *,
    causal: bool,
    window: int | None = None,
    side: str = "right",
) -> Tensor:
    """As `references.sdpa.visible_keys`: bool `[batch, q_len, kv_len]`.

    transformers knows one padded batch layout in decoding, padding on the left with all rows at the
    end (`banded_mask` above is its witness), so each request is masked by itself and put in its
    place.
    """
    visible = torch.zeros(len(q_lens), q_len, kv_len, dtype=torch.bool)
    for request, (rows, keys) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if rows == 0 or keys == 0:
            continue
        alone = masking_utils.sdpa_mask(
            batch_size=1,
            q_length=rows,
            kv_length=keys,
            q_offset=keys - rows if causal else 0,
            mask_function=mask_function(causal=causal, window=window),
            allow_is_causal_skip=False,
        )
        assert alone is not None
        row, key = (0, 0) if side == "right" else (q_len - rows, kv_len - keys)
        visible[request, row : row + rows, key : key + keys] = alone[0, 0]
    return visible
