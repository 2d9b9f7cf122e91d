"""Our packed bmm: its layout, AMX's tile products to the bit, tails, and what it refuses."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cases import bmm as cases
from harness.arithmetic import amx
from harness.engines.native.torch import tiles
from harness.engines.native.torch.bmm import bmm
from harness.engines.native.torch.vnni import DTYPES, pack, plain, unpack

TINY = 2.0**-126


def _bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small whole numbers, all different enough to tell their places apart."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=draw).to(dtype)


# Packing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 33, 17), (1, 64, 16), (3, 2, 5), (1, 65, 31)])
def test_unpack_undoes_pack(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    b = _bits(*shape, dtype=dtype)
    assert torch.equal(unpack(pack(b)), b)
    assert torch.equal(unpack(pack(b.mT)), b.mT)


@pytest.mark.parametrize(("dtype", "group"), list(zip(DTYPES, (1, 2, 2, 4), strict=True)))
def test_a_packed_element_stands_where_the_docstring_says(dtype: torch.dtype, group: int) -> None:
    b = _bits(2, 3 * 16 * group - 1, 40, dtype=dtype)
    packed = pack(b)
    assert packed.tiles.shape == (2, 3, 3, 16, 16 * group)
    assert packed.depth == 16 * group
    for i, k, n in ((0, 0, 0), (1, 5, 17), (1, 16 * group, 39), (0, b.shape[1] - 1, 15)):
        s, inside = divmod(k, packed.depth)
        r, j = divmod(inside, group)
        t, c = divmod(n, 16)
        assert packed.tiles[i, t, s, r, group * c + j] == b[i, k, n]


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_zero_and_a_tile_is_64_bytes_wide(dtype: torch.dtype) -> None:
    packed = pack(torch.ones(1, 3, 3).to(dtype))
    assert packed.tiles.double().sum() == 9
    assert packed.tiles.shape[-1] * dtype.itemsize == 64
    assert packed.tiles.is_contiguous()


def test_plain_is_the_tile_unpacked() -> None:
    b = _bits(1, 32, 16, dtype=torch.bfloat16)
    assert torch.equal(plain(pack(b).tiles[0, 0, 0]), b[0])


# Tile instructions


def _tile(a: list[float], b: list[float], c: float = 0.0) -> float:
    """c + <a, b> by tdpbf16ps: one row, one column."""
    left = torch.zeros(1, 32, dtype=torch.bfloat16)
    right = torch.zeros(1, 32, 1, dtype=torch.bfloat16)
    left[0, : len(a)] = torch.tensor(a, dtype=torch.float64).bfloat16()
    right[0, : len(b), 0] = torch.tensor(b, dtype=torch.float64).bfloat16()
    total = torch.zeros(1, 16)
    total[0, 0] = c
    return tiles.tdpbf16ps(total, left, pack(right).tiles[0, 0, 0])[0, 0].item()


def test_even_and_odd_k_are_separate_chains() -> None:
    """1 + 2**-24 rounds to 1 in one chain; from two chains 2**-23 is added at once."""
    small, one = 2.0**-24, 1.0
    assert _tile([one, 0, small, 0, small, 0], [1.0] * 6) == 1.0
    assert _tile([one, small, 0, small], [1.0] * 4) == 1.0 + 2.0**-23
    assert _tile([small, small], [1.0] * 2, c=1.0) == 1.0 + 2.0**-23


def test_a_product_is_not_rounded_before_it_is_added() -> None:
    """(1 + 2**-7)**2 keeps its 2**-14 beside 2**9, which leaves 14 bits after the point."""
    x = 1 + 2.0**-7
    assert _tile([2.0**9, 0, x], [1.0, 0, x]) == 2.0**9 + x * x


def test_subnormal_operands_are_zero() -> None:
    below = TINY / 2
    assert _tile([below], [2.0**100]) == 0.0
    assert _tile([TINY], [2.0**100]) == TINY * 2.0**100
    assert _tile([1.0], [1.0], c=TINY / 4) == 1.0
    assert _tile([0.0], [1.0], c=TINY / 4) == 0.0


def test_tiny_results_are_flushed_after_rounding() -> None:
    half = 2.0**-63
    assert _tile([half, 0], [half / 2, 0]) == 0.0
    # 24 bits, unbounded exponent: 2**-126 - 2**-150 is a number below the smallest normal ...
    assert _tile([half, 0, -(2.0**-75)], [half, 0, 2.0**-75]) == 0.0
    # ... and half of that spacing rounds up to the smallest normal.
    assert _tile([half, 0, -(2.0**-76)], [half, 0, 2.0**-75]) == TINY


def test_int8_tiles_wrap_and_never_saturate() -> None:
    low = torch.full((1, 64), -128, dtype=torch.int8)
    packed = pack(low.mT[None].expand(1, 64, 16)).tiles[0, 0, 0]
    top = torch.full((1, 16), 2**31 - 1, dtype=torch.int32)
    expected = 2**31 - 1 + 64 * 2**14 - 2**32
    assert tiles.tdpbssd(top, low, packed).unique().item() == expected


@settings(deadline=None, max_examples=60)
@given(cases.strategy(frozenset({"a_layout", "b_layout"}), ("bfloat16",)))
def test_bf16_tiles_equal_the_emulator_of_the_arithmetic(case: cases.BmmCase) -> None:
    """Two programs of the same page of the manual, bit for bit."""
    inputs = case.inputs()
    a, b = inputs["a"], inputs["b"]
    out = bmm(a, pack(b), out_dtype=torch.float32, path="tiles")
    assert torch.equal(out.double(), amx.tile_product(a, b))


def test_fp16_subnormals_count_in_tiles() -> None:
    a = torch.full((1, 1, 1), 2.0**-24, dtype=torch.float16)
    out = bmm(a, pack(a), out_dtype=torch.float32, path="tiles")
    assert out.item() == 2.0**-48


# Products


@pytest.mark.parametrize("path", ["portable", "tiles"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("k", [1, 31, 32, 33, 63, 65, 129])
def test_whole_numbers_come_out_exactly(path: str, dtype: torch.dtype, m: int, k: int) -> None:
    if path == "tiles" and dtype == torch.float32:
        with pytest.raises(ValueError, match="no tile instruction"):
            bmm(torch.ones(1, m, k), pack(torch.ones(1, k, 3)), path=path)
        return
    a, b = _bits(2, m, k, dtype=dtype), _bits(2, k, 19, dtype=dtype, seed=1)
    out = bmm(a, pack(b), path=path, out_dtype=None if dtype == torch.int8 else torch.float32)
    assert torch.equal(out.double(), a.double() @ b.double())


@pytest.mark.parametrize("path", ["portable", "tiles"])
def test_nothing_beyond_a_tensor_is_read(path: str) -> None:
    wide = torch.full((1, 6, 40), torch.nan, dtype=torch.bfloat16)
    wide[..., 3:36] = 1
    a = wide[..., 3:36]
    assert torch.equal(bmm(a, pack(a.mT), path=path), torch.full((1, 6, 6), 33.0).bfloat16())


def test_scale_and_addend_come_once_in_float32() -> None:
    a, c = torch.ones(1, 1, 3, dtype=torch.bfloat16), torch.full((1,), 7.0, dtype=torch.bfloat16)
    assert bmm(a, pack(a.mT), alpha=0.5, c=c, beta=-2.0).item() == 1.5 - 14
    nan = torch.full((1,), torch.nan, dtype=torch.bfloat16)
    assert bmm(a, pack(a.mT), c=nan, beta=0).item() == 3
    # 256 + 1 - 256: rounded to bfloat16 before the addend, the 1 is lost.
    b = torch.tensor([[[256.0], [1.0], [0.0]]]).bfloat16()
    assert bmm(a, pack(b), c=torch.tensor(-256.0).bfloat16()).item() == 1


def test_int8_takes_an_int32_addend() -> None:
    a, c = torch.full((1, 1, 5), -128, dtype=torch.int8), torch.tensor([2**30], dtype=torch.int32)
    assert bmm(a, pack(a.mT), c=c).item() == 5 * 2**14 + 2**30


A = torch.ones(2, 3, 4)
SHORT = A.to(torch.int8)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"a": A.bfloat16()}, r"a is torch.bfloat16, b torch.float32: pass a in the dtype"),
        ({"a": torch.ones(2, 3, 5)}, r"a has shape \(2, 3, 5\), expected \[2, at least 1, 4\]"),
        ({"a": torch.ones(1, 3, 4)}, r"expected \[2, at least 1, 4\]: as many"),
        ({"c": torch.ones(3, dtype=torch.int32)}, r"c is torch.int32, expected int32 for int8"),
        ({"out_dtype": torch.bfloat16}, r"out_dtype=torch.bfloat16, expected one of"),
        ({"path": "fast"}, r"path='fast' is unknown; expected 'portable' or 'tiles'"),
        ({"path": "tiles"}, r"dtype=torch.float32 has no tile instruction; pass path='portable'"),
        ({"a": SHORT, "b": pack(SHORT.mT), "alpha": 2.0}, r"alpha=2.0, .* must be 1 for int8"),
        ({"a": SHORT, "b": pack(SHORT.mT), "c": torch.ones(3)}, r"c is torch.float32"),
    ],
)
def test_bad_input_names_value_expectation_and_remedy(changed: dict, words: str) -> None:
    arguments: dict[str, Any] = {"a": A, "b": pack(A.mT)} | changed
    with pytest.raises(ValueError, match=words):
        bmm(**arguments)


def test_packing_refuses_what_it_can_not_hold() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch.float64 can't be packed; expected one of"):
        pack(torch.ones(1, 2, 2).double())
    with pytest.raises(ValueError, match=r"shape \(2, 2\), expected 3 axes: pass"):
        pack(torch.ones(2, 2))


def test_tiles_refuse_other_shapes_and_dtypes() -> None:
    with pytest.raises(ValueError, match=r"tiles are .*expected torch.float32, torch.bfloat16 x 2"):
        tiles.tdpbf16ps(torch.zeros(1, 16), torch.zeros(1, 32), torch.zeros(16, 32))
    with pytest.raises(ValueError, match=r"with at most 16 rows"):
        tiles.tdpbf16ps(
            torch.zeros(17, 16), torch.zeros(17, 32).bfloat16(), torch.zeros(16, 32).bfloat16()
        )
