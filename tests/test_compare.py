"""The judge on trial: ways in which other harnesses pass a wrong answer."""

import math

import pytest
import torch

from harness.arithmetic.midrad import MidRad
from harness.compare import compare
from harness.contract import broken, changed, same
from tests.test_run import CASE

NAN, INF = math.nan, math.inf


def judge(observed, mid, rad=0.0, judged=None):
    mid = torch.as_tensor(mid, dtype=torch.float64)
    observed = torch.as_tensor(observed, dtype=torch.float32)
    allowed = MidRad(mid, torch.full_like(mid, rad))
    return compare({"out": observed}, {"out": allowed}, {} if judged is None else {"out": judged})


def test_equal_is_exact():
    verdict = judge([1.0, 2.0], [1.0, 2.0])
    assert verdict.allowed
    assert (verdict.excess, verdict.exact, verdict.elements) == (0, 2, 2)


def test_distance_is_measured_in_radii():
    verdict = judge([1.5], [1.0], rad=1.0)
    assert verdict.allowed
    assert verdict.excess == pytest.approx(0.5)
    assert verdict.exact == 0


@pytest.mark.parametrize(
    ("observed", "mid"),
    [
        pytest.param([NAN], [1.0], id="nan-compared-with-greater"),
        pytest.param([1.0], [NAN], id="nan-in-the-oracle"),
        pytest.param([NAN], [NAN], id="nan-in-both"),
        pytest.param([1.0, NAN], [1.0, NAN], id="nan-beside-a-right-answer"),
        pytest.param([INF], [1.0], id="inf-for-finite"),
        pytest.param([3e38], [INF], id="finite-for-inf"),
        pytest.param([-INF], [INF], id="inf-of-the-other-sign"),
        pytest.param([1e-30], [0.0], id="not-zero-for-exact-zero"),
        pytest.param([0.0105], [0.001], id="small-and-ten-times-wrong"),
    ],
)
def test_does_not_pass(observed, mid):
    verdict = judge(observed, mid, rad=1e-4 if mid != [0.0] else 0.0)
    assert not verdict.allowed
    assert verdict.why


def test_an_infinity_that_is_expected_passes():
    assert judge([-INF], [-INF]).allowed


def test_one_wrong_element_in_a_million_is_found_and_placed():
    mid = torch.ones(1000, 1000)
    observed = mid.clone()
    observed[123, 456] += 1e-3
    verdict = judge(observed, mid, rad=1e-6)
    assert not verdict.allowed
    assert verdict.where == (123, 456)
    assert verdict.exact == 999_999
    assert "out[123, 456] is 1.00" in verdict.why


def test_a_fifth_of_the_rows_wrong_is_not_enough_right():
    mid = torch.ones(10, 4)
    observed = mid.clone()
    observed[8:] = 2.0
    assert not judge(observed, mid, rad=0.1).allowed


def test_nothing_to_judge_does_not_pass():
    nothing = torch.zeros(2, dtype=torch.bool)
    verdict = judge([1.0, 2.0], [1.0, 2.0], judged=nothing)
    assert not verdict.allowed
    assert "no element of the answer has a meaning" in verdict.why


def test_a_radius_that_allows_everything_judges_nothing():
    verdict = judge([5.0], [1.0], rad=INF)
    assert verdict.elements == 0
    assert not verdict.allowed
    mixed = compare(
        {"out": torch.tensor([5.0, 1.0])},
        {"out": MidRad(torch.ones(2).double(), torch.tensor([INF, 0.0]).double())},
        {},
    )
    assert (mixed.allowed, mixed.elements) == (True, 1)


def test_padding_is_not_judged_and_the_rest_is():
    keep = torch.tensor([True, False])
    assert judge([1.0, NAN], [1.0, 2.0], judged=keep).allowed
    assert not judge([NAN, 2.0], [1.0, 2.0], judged=keep).allowed


def test_bools_and_integers_are_exact():
    mask = torch.tensor([True, False])
    allowed = {"visible": MidRad(mask.double())}
    assert compare({"visible": mask}, allowed, {}).allowed
    assert not compare({"visible": ~mask}, allowed, {}).allowed


def test_the_worst_output_is_named():
    right = MidRad(torch.zeros(1, dtype=torch.float64))
    verdict = compare({"a": torch.zeros(1), "b": torch.ones(1)}, {"a": right, "b": right}, {})
    assert verdict.output == "b"


def test_the_contract_names_what_is_broken():
    out = torch.zeros(2, 4, 3, 16, dtype=torch.bfloat16)
    assert broken(CASE, {"out": out}) is None
    assert broken(CASE, {}) == "output out is missing; got -"
    assert broken(CASE, {"out": out.float()}) == "out has dtype float32, expected bfloat16"
    assert broken(CASE, {"out": out[None]}) == (
        "out has shape [1, 2, 4, 3, 16], expected [2, 4, 3, 16]"
    )


def test_bits_are_compared_as_bits():
    x = torch.tensor([0.0, NAN])
    assert same({"x": x}, {"x": x.clone()}) is None
    assert same({"x": x}, {"x": torch.tensor([-0.0, NAN])}) is not None
    assert same({"x": x}, {}) is not None
    assert changed({"x": x}, {"x": x.clone()}) is None
    assert changed({"x": x}, {"x": x + 1}) == "the subject changed its input x"
