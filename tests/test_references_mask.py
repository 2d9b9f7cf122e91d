"""The reference masks: equal to transformers' bit for bit, and to their own docstring."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from references.banded_mask import banded_mask
from references.hf import banded_mask as witness
from references.sdpa import visible_keys

COUNTS = st.integers(1, 9)
OFFSETS = st.integers(0, 20)
WINDOWS = st.none() | st.integers(1, 12)
SIDES = st.sampled_from(["right", "left"])


@st.composite
def paddings(draw: st.DrawFn, length: int) -> dict[str, list[int]]:
    batch = draw(st.integers(1, 3))
    sides = draw(st.sets(st.sampled_from(["left_padding", "right_padding"])))
    counts = st.lists(st.integers(0, length), min_size=batch, max_size=batch)
    return {side: draw(counts) for side in sorted(sides)}


@st.composite
def ragged(draw: st.DrawFn) -> dict:
    batch, q_len, kv_len = draw(st.integers(1, 3)), draw(COUNTS), draw(st.integers(1, 15))
    causal = draw(st.booleans())
    return {
        "q_lens": draw(st.lists(st.integers(0, q_len), min_size=batch, max_size=batch)),
        "kv_lens": draw(st.lists(st.integers(0, kv_len), min_size=batch, max_size=batch)),
        "q_len": q_len,
        "kv_len": kv_len,
        "causal": causal,
        "window": draw(WINDOWS) if causal else None,
        "side": draw(SIDES),
    }


@given(COUNTS, OFFSETS, WINDOWS, st.data())
def test_agrees_with_transformers(n: int, offset: int, window: int | None, data) -> None:
    padding = data.draw(paddings(offset + n))
    ours = banded_mask(n, offset, window=window, **padding)
    assert ours.dtype == torch.bool
    assert torch.equal(ours, witness.banded_mask(n, offset, window=window, **padding))


@given(COUNTS, OFFSETS, WINDOWS, st.integers(1, 9), st.data())
def test_chunks_agree_with_transformers(n: int, offset: int, window, chunk: int, data) -> None:
    padding = data.draw(paddings(offset + n))
    ours = banded_mask(n, offset, window=window, chunk=chunk, **padding)
    theirs = witness.banded_mask(n, offset, window=window, chunk=chunk, **padding)
    assert torch.equal(ours, theirs)


@given(COUNTS, OFFSETS, st.integers(2, 12), st.data())
def test_kept_tokens_count_in_the_window(n: int, offset: int, window: int, data) -> None:
    keep = data.draw(st.integers(1, window - 1))
    shown = banded_mask(n, offset, window=window, keep=keep)
    assert shown.sum(dim=-1).tolist() == [min(window, offset + i + 1) for i in range(n)]
    for i, row in enumerate(shown):
        assert row[: min(keep, offset + i + 1)].all()
        assert row[max(0, offset + i + 1 - (window - keep)) : offset + i + 1].all()


@given(ragged())
def test_ragged_batch_agrees_with_transformers(batch: dict) -> None:
    assert torch.equal(visible_keys(**batch), witness.visible_keys(**batch))


@given(COUNTS, OFFSETS, st.integers(1, 40))
def test_window_shows_that_many_keys(n: int, offset: int, window: int) -> None:
    shown = banded_mask(n, offset, window=window).sum(dim=-1)
    assert shown.tolist() == [min(window, offset + i + 1) for i in range(n)]


@given(OFFSETS, WINDOWS)
def test_single_query_is_the_last_row(offset: int, window: int | None) -> None:
    full = banded_mask(offset + 1, window=window)
    assert torch.equal(banded_mask(1, offset, window=window)[0], full[-1])


@given(st.lists(COUNTS, min_size=1, max_size=4), WINDOWS)
def test_chunks_are_rows_of_the_full_mask(chunks: list[int], window: int | None) -> None:
    full = banded_mask(sum(chunks), window=window)
    offset = 0
    for n in chunks:
        rows = full[offset : offset + n]
        assert torch.equal(banded_mask(n, offset, window=window), rows[:, : offset + n])
        # What a chunk's mask leaves out, the keys that come later, no row of it sees.
        assert not rows[:, offset + n :].any()
        offset += n


@given(COUNTS, OFFSETS)
def test_window_of_kv_len_is_no_window(n: int, offset: int) -> None:
    assert torch.equal(banded_mask(n, offset, window=offset + n), banded_mask(n, offset))


def test_alignment_is_lower_right() -> None:
    assert banded_mask(2, 3).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible_keys([2], [5], 2, 5, causal=True).int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    ]


def test_padding_hides_keys_and_shifts_nothing() -> None:
    left = banded_mask(4, window=2, left_padding=[2])[0].int().tolist()
    assert left == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    right = banded_mask(4, window=2, right_padding=[2])[0].int().tolist()
    assert right == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


@given(COUNTS, OFFSETS, WINDOWS, st.data())
def test_left_padded_decode_is_a_ragged_batch(
    n: int, offset: int, window: int | None, data
) -> None:
    length = offset + n
    padding = data.draw(st.lists(st.integers(0, length), min_size=1, max_size=3))
    kv_lens = [length - p for p in padding]
    q_lens = [min(n, kept) for kept in kv_lens]
    ours = visible_keys(q_lens, kv_lens, n, length, causal=True, window=window, side="left")
    assert torch.equal(ours, banded_mask(n, offset, window=window, left_padding=padding))


@given(ragged())
def test_request_alone_sees_the_same_keys(batch: dict) -> None:
    visible = visible_keys(**batch)
    for b, (rows, keys) in enumerate(zip(batch["q_lens"], batch["kv_lens"], strict=True)):
        on_left = batch["side"] == "left"
        row, key = (batch["q_len"] - rows, batch["kv_len"] - keys) if on_left else (0, 0)
        inside = visible[b, row : row + rows, key : key + keys]
        assert visible[b].sum() == inside.sum()
        if batch["causal"] and 1 <= rows <= keys:
            assert torch.equal(inside, banded_mask(rows, keys - rows, window=batch["window"]))
        if not batch["causal"]:
            assert inside.all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: banded_mask(0), r"n=0 must be at least 1.*pass"),
        (lambda: banded_mask(1, -1), r"offset=-1 must be at least 0.*pass"),
        (lambda: banded_mask(1, window=0), r"window=0 must be at least 1.*pass None"),
        (lambda: banded_mask(1, window=2, keep=2), r"keep=2 must be in 1..window - 1.*pass 0"),
        (lambda: banded_mask(1, keep=1), r"keep=1 must be in 1..window - 1.*pass 0"),
        (lambda: banded_mask(1, chunk=0), r"chunk=0 must be at least 1.*pass None"),
        (lambda: banded_mask(2, 1, left_padding=[0, 4]), r"left_padding\[1\]=4 must be in 0..3"),
        (lambda: banded_mask(2, 1, right_padding=[-1]), r"right_padding\[0\]=-1 must be in 0..3"),
        (
            lambda: banded_mask(2, left_padding=torch.ones(1)),
            r"left_padding=tensor.* must be a 1-D",
        ),
        (lambda: banded_mask(2, left_padding=[0], right_padding=[0, 1]), r"give both"),
        (lambda: visible_keys([1], [9], 1, 8, causal=True), r"kv_lens\[0\]=9 must be in 0..8"),
        (lambda: visible_keys([1], [1, 2], 1, 8, causal=True), r"give both"),
        (lambda: visible_keys([1], [1], 1, 1, causal=False, window=2), r"window=2 needs causal"),
        (lambda: visible_keys([1], [1], 1, 1, causal=True, side="top"), r"side='top' must be"),
    ],
)
def test_bad_input_names_value_expectation_and_remedy(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
