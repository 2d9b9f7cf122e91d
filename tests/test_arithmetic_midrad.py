"""Midpoint-radius operations enclose every value that they may stand for."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from harness.arithmetic.elementwise import cosine_sine, divide_by, tanh
from harness.arithmetic.formats import BF16, FP16, FP32, Format, round_to
from harness.arithmetic.midrad import MidRad, cat, exact

FINITE = st.floats(min_value=-(2.0**40), max_value=2.0**40, allow_subnormal=False)
QUICK = settings(max_examples=200, deadline=None, derandomize=True)


def _one(x: float, rad: float | None = None) -> MidRad:
    mid = torch.tensor([x], dtype=torch.float64)
    return MidRad(mid, None if rad is None else torch.tensor([rad], dtype=torch.float64))


def _covers(got: MidRad, value: Fraction) -> bool:
    return abs(Fraction(float(got.mid)) - value) <= Fraction(float(got.rad))


@given(FINITE, FINITE)
@example(2.2250738585072014e-308, 2.568940847083358e-177)  # the remainder underflows
@QUICK
def test_sums_products_and_quotients_cover_the_rational_result(a: float, b: float) -> None:
    x, y = _one(a), _one(b)
    assert _covers(x + y, Fraction(a) + Fraction(b))
    assert _covers(x - y, Fraction(a) - Fraction(b))
    if abs(a * b) > 2.0**-900 or a * b == 0 == min(abs(a), abs(b)):
        assert _covers(x * y, Fraction(a) * Fraction(b))
        assert _covers(x.scale(b), Fraction(a) * Fraction(b))
    if abs(b) > 2.0**-900 and abs(a / b) > 2.0**-900:
        assert _covers(divide_by(x, b), Fraction(a) / Fraction(b))


@given(FINITE, FINITE, st.floats(0, 1), st.floats(0, 1), st.floats(-1, 1), st.floats(-1, 1))
@QUICK
def test_radii_cover_every_pair_of_operands(
    a: float, b: float, ra: float, rb: float, ta: float, tb: float
) -> None:
    x, y = Fraction(a) + Fraction(ra) * Fraction(ta), Fraction(b) + Fraction(rb) * Fraction(tb)
    left, right = _one(a, ra), _one(b, rb)
    slack = 1 + Fraction(2) ** -40  # the radius itself is rounded to float64
    for got, value in ((left + right, x + y), (left - right, x - y), (left * right, x * y)):
        error = abs(Fraction(float(got.mid)) - value)
        assert error <= Fraction(float(got.rad)) * slack + Fraction(2) ** -900


@given(st.integers(-(2**7), 2**7), st.integers(-(2**7), 2**7), st.integers(-20, 20))
@QUICK
def test_what_float64_holds_exactly_keeps_radius_zero(a: int, b: int, shift: int) -> None:
    x, y = _one(math.ldexp(a, shift)), _one(float(b))
    for got in (x * y, x + y, x.scale(float(b)), x.scale(0.5), divide_by(x, 4.0)):
        assert float(got.rad) == 0


@given(FINITE, st.floats(0, 4), st.floats(-1, 1), st.sampled_from([BF16, FP16, FP32]))
@QUICK
def test_a_known_rounding_covers_every_value_of_the_interval(
    x: float, rad: float, at: float, fmt: Format
) -> None:
    inside = torch.tensor([x + rad * at], dtype=torch.float64)
    assume(abs(float(inside) - x) <= rad)
    got = _one(x, rad).round(fmt)
    value = round_to(inside, fmt)
    assert torch.equal(value, got.mid) or bool((value - got.mid).abs() <= got.rad)


def test_a_known_rounding_away_from_ties_costs_nothing() -> None:
    assert float(_one(1.001, 2.0**-30).round(BF16).rad) == 0
    assert float(_one(1 + 2.0**-8, 2.0**-30).round(BF16).rad) == 2.0**-7
    assert float(_one(1 + 2.0**-8).round(BF16).rad) == 0


def test_overflow_is_certain_or_no_claim() -> None:
    certain = _one(1e6, 1.0).round(FP16)
    assert (float(certain.mid), float(certain.rad)) == (math.inf, 0)
    for middle in (65519.0, 65521.0):
        open_ = _one(middle, 4.0).round(FP16)
        assert math.isfinite(float(open_.mid))
        assert float(open_.rad) == math.inf


def test_masked_scores_survive_every_operation() -> None:
    x = exact(torch.tensor([1.0, 2.0])).where(torch.tensor([True, False]), -math.inf)
    y = x.free(FP32).scale(0.3).round(BF16)
    assert float(y.mid[1]) == -math.inf
    assert float(y.rad[1]) == 0


@given(FINITE, st.integers(1, 5), st.booleans(), st.sampled_from([BF16, FP16, FP32]))
@QUICK
def test_free_roundings_cover_the_worst_ones(x: float, times: int, up: bool, fmt: Format) -> None:
    got = _one(x).free(fmt, times)
    worst = Fraction(x)
    for _ in range(times):
        # The largest error of one rounding, as if every value stood right at a tie.
        step = abs(worst) * Fraction(fmt.u) + Fraction(fmt.tiny) / 2
        worst += step if up else -step
    error = abs(worst - Fraction(float(got.mid)))
    assert error <= Fraction(float(got.rad)) * (1 + Fraction(2) ** -40)


@pytest.mark.parametrize("at", [-1.0, -0.3, 0.0, 0.7, 1.0])
def test_functions_cover_the_ends_of_their_interval(at: float) -> None:
    mid = torch.linspace(-8, 8, 401, dtype=torch.float64)
    rad = torch.full_like(mid, 0.05)
    x = MidRad(mid, rad)
    inside = mid + at * rad
    got = tanh(x, 1.0, FP32)
    assert bool(((torch.tanh(inside) - got.mid).abs() <= got.rad).all())
    cos, sin = cosine_sine(x, 1.0, FP32)
    assert bool(((torch.cos(inside) - cos.mid).abs() <= cos.rad).all())
    assert bool(((torch.sin(inside) - sin.mid).abs() <= sin.rad).all())


def test_cat_keeps_radii_in_place() -> None:
    joined = cat([exact(torch.ones(1, 2)), MidRad(torch.ones(1, 1), torch.ones(1, 1))])
    assert joined.rad.tolist() == [[0, 0, 1]]
