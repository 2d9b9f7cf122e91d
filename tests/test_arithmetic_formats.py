"""Rounding into binary formats is exact, bit for bit, against torch, numpy and ml_dtypes."""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.arithmetic.formats import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    Format,
    format_of,
    half_gaps,
    round_scalar,
    round_to,
    ulp,
)

NUMPY: dict[str, type] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float32": np.float32,
}
NARROW = (BF16, FP16, FP8_E4M3, FP8_E5M2)
SHORT = (*NARROW, FP32)


def _all_values(fmt: Format) -> torch.Tensor:
    """Every bit pattern of a format of 8 or 16 bits, as float64."""
    bits = 8 if fmt in (FP8_E4M3, FP8_E5M2) else 16
    patterns = np.arange(2**bits, dtype=np.uint32).astype(f"uint{bits}")
    with np.errstate(all="ignore"):
        return torch.from_numpy(patterns.view(NUMPY[fmt.name]).astype(np.float64))


def _finite(fmt: Format) -> torch.Tensor:
    values = _all_values(fmt)
    return values[values.isfinite()].unique()


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal to the bit, NaN standing for any NaN."""
    nan = want.isnan()
    return torch.equal(got.isnan(), nan) and torch.equal(
        got[~nan].view(torch.int64), want[~nan].view(torch.int64)
    )


def _by_numpy(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The library's own conversion of float32 values, correctly rounded."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(
            x.numpy().astype(np.float32).astype(NUMPY[fmt.name]).astype(np.float64)
        )


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_every_value_of_a_format_is_kept(fmt: Format) -> None:
    values = _all_values(fmt)
    assert _same(round_to(values, fmt), values)


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_midpoints_and_their_neighbours_round_like_the_library(fmt: Format) -> None:
    values = _finite(fmt)
    middle = (values[1:] + values[:-1]) / 2
    middle = middle[middle == middle.float().double()]
    around = torch.cat(
        [middle]
        + [
            torch.nextafter(middle.float(), torch.tensor(to).float()).double()
            for to in (math.inf, -math.inf)
        ]
    )
    assert _same(round_to(around, fmt), _by_numpy(around, fmt))


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_float32_values_round_like_the_library(fmt: Format) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64)
    with np.errstate(all="ignore"):
        x = torch.from_numpy(bits.astype(np.uint32).view(np.float32).astype(np.float64))
    # Random exponents hardly ever meet the small formats: fold the values into their range too.
    folded = (x.frexp()[0] * torch.exp2(torch.arange(x.numel()) % 50 - 30)).float().double()
    for sample in (x, folded):
        assert _same(round_to(sample, fmt), _by_numpy(sample, fmt))


@given(st.floats(width=64))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_float64_rounds_into_float32_like_the_processor(x: float) -> None:
    one = torch.tensor([x], dtype=torch.float64)
    assert _same(round_to(one, FP32), one.float().double())


@pytest.mark.parametrize("fmt", SHORT, ids=lambda f: f.name)
def test_float64_is_not_rounded_twice(fmt: Format) -> None:
    # Just above a tie by less than float32 can say: through float32 this would go to even.
    tie = 1 + fmt.u
    assert round_scalar(tie, fmt) == 1
    assert round_scalar(tie + 2.0**-52, fmt) == 1 + 2 * fmt.u
    assert round_scalar(-tie - 2.0**-52, fmt) == -1 - 2 * fmt.u


def test_overflow_follows_the_declaration() -> None:
    assert round_scalar(65519.0, FP16) == 65504
    assert round_scalar(65520.0, FP16) == math.inf
    assert round_scalar(464.0, FP8_E4M3) == 448
    assert math.isnan(round_scalar(465.0, FP8_E4M3))
    assert round_scalar(-1e9, FP8_E4M3.saturating()) == -448
    assert round_scalar(math.inf, FP16.saturating()) == 65504


def test_zero_and_float64_pass_unchanged() -> None:
    x = torch.tensor([-0.0, 0.0, 1e-300, math.pi, math.inf], dtype=torch.float64)
    assert round_to(x, FP64) is x
    assert round_to(x, BF16).signbit().tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_half_gaps_are_half_the_distance_to_the_neighbours(fmt: Format) -> None:
    values = _finite(fmt)
    below, above = half_gaps(values, fmt)
    assert torch.equal(below[1:] * 2, values[1:] - values[:-1])
    assert torch.equal(above[:-1] * 2, values[1:] - values[:-1])


@pytest.mark.parametrize("fmt", [FP32, FP64], ids=lambda f: f.name)
@pytest.mark.parametrize("exponent", [-1022, -126, -125, -1, 0, 1, 100])
def test_half_gaps_narrow_below_a_power_of_two(fmt: Format, exponent: int) -> None:
    dtype: Callable[[float], np.floating] = np.float32 if fmt is FP32 else np.float64
    x = dtype(math.ldexp(1.0, exponent))
    for value in (x, -x):
        below, above = half_gaps(torch.tensor([float(value)], dtype=torch.float64), fmt)
        with np.errstate(all="ignore"):
            down = float(value) - float(np.nextafter(value, dtype(-np.inf)))
            up = float(np.nextafter(value, dtype(np.inf))) - float(value)
        # Half of float64's own smallest step is not a float64.
        assert (float(below), float(above)) == (down / 2, up / 2)


def test_ulp_is_the_spacing_of_the_binade() -> None:
    x = torch.tensor([0.0, 1.0, 1.5, 2.0, -3.0, 2.0**-130], dtype=torch.float64)
    want = [FP32.tiny, 2.0**-23, 2.0**-23, 2.0**-22, 2.0**-22, FP32.tiny]
    assert ulp(x, FP32).tolist() == want


def test_a_dtype_without_a_format_is_named() -> None:
    with pytest.raises(ValueError, match="dtype=int32 has no binary format"):
        format_of(torch.zeros(1, dtype=torch.int32))
