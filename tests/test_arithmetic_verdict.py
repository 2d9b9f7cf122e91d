"""What passes and what must never pass."""

import math

import pytest
import torch

from harness.arithmetic.formats import BF16, FP8_E4M3, FP16, FP32
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.verdict import exact_share, excess

NAN, INF = math.nan, math.inf


def _excess(observed: float, mid: float, rad: float, dtype: torch.dtype = torch.float32) -> float:
    expected = MidRad(
        torch.tensor([mid], dtype=torch.float64), torch.tensor([rad], dtype=torch.float64)
    )
    return float(excess(torch.tensor([observed], dtype=torch.float64).to(dtype), expected))


@pytest.mark.parametrize(("mid", "rad"), [(0, 0), (0, 1), (NAN, 0), (NAN, NAN), (0, INF), (INF, 0)])
def test_nan_never_passes(mid: float, rad: float) -> None:
    assert _excess(NAN, mid, rad) == INF


@pytest.mark.parametrize("observed", [0.0, 1.0, INF, -INF])
def test_an_undefined_expectation_never_passes(observed: float) -> None:
    assert _excess(observed, NAN, 0) == INF
    assert _excess(observed, 0.0, NAN) == INF
    assert _excess(observed, NAN, INF) == INF


def test_infinity_passes_only_where_the_program_overflows() -> None:
    assert _excess(INF, 60000.0, 1.0, torch.float16) > 1
    assert _excess(INF, 65519.0, 1.0, torch.float16) == 1
    assert _excess(INF, 65520.0, 0.0, torch.float16) == 0
    assert _excess(-INF, 65520.0, 0.0, torch.float16) == INF
    assert _excess(-INF, 1e6, 1.0, torch.float16) > 1
    assert _excess(INF, 0.0, INF, torch.float16) == 0


def test_a_certain_infinity_rejects_every_finite_value() -> None:
    assert _excess(INF, INF, 0) == 0
    assert _excess(-INF, -INF, 0) == 0
    assert _excess(-INF, INF, 0) == INF
    for finite in (0.0, 65504.0, -1.0):
        assert _excess(finite, INF, 0) == INF
        assert _excess(finite, -INF, 0) == INF


def test_no_claim_passes_numbers_only() -> None:
    for observed in (0.0, -3.0, INF, -INF):
        assert _excess(observed, 0.0, INF) == 0


def test_an_exact_expectation_allows_only_its_own_rounding() -> None:
    assert _excess(1.0, 1.0, 0, torch.bfloat16) == 0
    assert _excess(1.0, 1.001, 0, torch.bfloat16) == 0
    assert _excess(1 + 2.0**-7, 1.001, 0, torch.bfloat16) == INF
    assert _excess(0.0, 0.0, 0) == 0
    assert _excess(-0.0, 0.0, 0) == 0
    assert _excess(FP32.tiny, 0.0, 0) == INF


def test_ties_are_closed_on_both_sides() -> None:
    tie = 1 + BF16.u
    assert _excess(1.0, tie, 0, torch.bfloat16) == 0
    assert _excess(1 + 2 * BF16.u, tie, 0, torch.bfloat16) == 0
    assert _excess(1 - BF16.u, 1 - BF16.u / 2, 0, torch.bfloat16) == 0
    assert _excess(1.0, 1 - BF16.u / 2, 0, torch.bfloat16) == 0
    assert _excess(1.0, 1 - BF16.u * 0.51, 0, torch.bfloat16) == INF


def test_excess_is_the_distance_in_radii() -> None:
    half_ulp = 2.0**-24
    assert _excess(1.0, 1 + half_ulp + 3 * 2.0**-30, 2.0**-30) == 3
    assert _excess(1.0, 1 - half_ulp / 2 - 3 * 2.0**-30, 2.0**-30) == 3


def test_a_float64_output_is_judged_to_its_last_bit() -> None:
    x = 1 / 3
    assert _excess(x, x, 0, torch.float64) == 0
    assert _excess(math.nextafter(x, 1), x, 0, torch.float64) == INF
    assert _excess(math.nextafter(x, 1), x, 2.0**-54, torch.float64) <= 1


def test_saturating_formats_hold_everything_beyond_their_largest() -> None:
    expected = MidRad(torch.tensor([1e4], dtype=torch.float64))
    out = torch.tensor([448.0])
    assert float(excess(out, expected, FP8_E4M3.saturating())) == 0
    assert float(excess(out, expected, FP8_E4M3)) == INF
    assert float(excess(-out, expected, FP8_E4M3.saturating())) == INF


def test_a_missing_element_is_an_error_not_a_pass() -> None:
    with pytest.raises(ValueError, match="observed has shape"):
        excess(torch.zeros(1), MidRad(torch.zeros(2)))
    with pytest.raises(ValueError, match="observed has shape"):
        excess(torch.zeros(()), MidRad(torch.zeros(2)))


def test_exact_share_counts_equal_elements() -> None:
    expected = MidRad(torch.tensor([1.001, 2.0, -0.0, NAN], dtype=torch.float64))
    observed = torch.tensor([1.0, 2.0, 0.0, NAN], dtype=torch.bfloat16)
    assert exact_share(observed, expected) == 0.75
    assert exact_share(torch.zeros(0), MidRad(torch.zeros(0)), FP16) == 1
