"""The fused softmax encloses what a kernel may return: errors and simulated kernels."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.arithmetic.dot import Accumulate
from harness.arithmetic.exponential import Exp, cubic_exp
from harness.arithmetic.formats import BF16, FP16, FP32, FP64, Format, denormals_are_zero, round_to
from harness.arithmetic.midrad import MidRad, exact
from harness.arithmetic.mode import DET, PROB, Mode
from harness.arithmetic.softmax import SoftmaxPV, log_sum_exp, softmax_pv

QUICK = settings(max_examples=40, deadline=None, derandomize=True)
EXACT = SoftmaxPV(
    exp=Exp(e0=0.0),
    sum=Accumulate(format=FP64, exact_products=True, epilogue=0),
    pv=Accumulate(format=FP64),
)
"""A kernel in float64: what radius is left is that of the scores."""


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _plain(s: Tensor, v: Tensor, sink: float | None = None) -> Tensor:
    extra = s[..., :1] * 0 + (-math.inf if sink is None else sink)
    return torch.softmax(torch.cat([s, extra], -1), -1)[..., :-1] @ v


def _covered(observed: Tensor, got: MidRad) -> bool:
    return bool(((observed - got.mid).abs() <= got.rad).all())


@given(n=st.integers(1, 40), seed=st.integers(0, 99), loud=st.sampled_from([0.1, 1.0, 10.0]))
@QUICK
def test_the_midpoint_is_the_plain_softmax(n: int, seed: int, loud: float) -> None:
    s, v = _random(3, n, seed=seed) * loud, _random(n, 5, seed=seed + 1000)
    s[:, n // 2 + 1 :] = s[:, n // 2 + 1 :].masked_fill(
        _random(3, n)[:, n // 2 + 1 :] > 0, -math.inf
    )
    for sink in (None, 0.5):
        got = softmax_pv(exact(s), exact(v), EXACT, DET, None if sink is None else _sink(sink))
        want = _plain(s, v, sink)
        # Two float64 evaluations of n terms: 1e-12 of sum p |v| is far above their roundings.
        assert bool(((got.mid - want).abs() <= 1e-12 * v.abs().amax(0)).all())
        assert bool((got.rad <= 1e-12 * v.abs().amax(0)).all())


def _sink(value: float) -> MidRad:
    return exact(torch.tensor([[value]], dtype=torch.float64))


@given(
    n=st.integers(1, 12),
    seed=st.integers(0, 99),
    size=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 5.0]),
    sink=st.sampled_from([None, -1.0, 2.0]),
)
@QUICK
def test_the_worst_score_errors_are_covered(
    n: int, seed: int, size: float, sink: float | None
) -> None:
    s, v = _random(1, n, seed=seed) * 2, _random(n, 3, seed=seed + 1000)
    r = torch.rand(1, n, generator=torch.Generator().manual_seed(seed)).double() * size
    got = softmax_pv(MidRad(s, r), exact(v), EXACT, DET, None if sink is None else _sink(sink))
    for column in range(3):
        for sign in (1.0, -1.0):
            # Push every key above the mean up and every other one down, for this column.
            push = torch.where(v[:, column] * sign > got.mid[:, column] * sign, r, -r)
            assert _covered(_plain(s + push, v, sink), got)


@given(n=st.integers(1, 30), seed=st.integers(0, 99), size=st.sampled_from([1e-6, 1e-3, 0.1]))
@QUICK
def test_prob_is_never_wider_than_det(n: int, seed: int, size: float) -> None:
    s, v = _random(4, n, seed=seed), _random(n, 3, seed=seed + 1000)
    scores = MidRad(s, torch.full_like(s, size))
    for spec in (SoftmaxPV(), SoftmaxPV(weights=BF16, rounding_known=False), SoftmaxPV(block=7)):
        prob, det = (
            softmax_pv(scores, exact(v), spec, PROB),
            softmax_pv(scores, exact(v), spec, DET),
        )
        assert bool((prob.rad <= det.rad * (1 + 2.0**-20)).all())
        together = softmax_pv(scores, exact(v), spec, PROB, independent=False)
        assert bool((prob.rad <= together.rad * (1 + 2.0**-20)).all())


def _kernel(
    s: Tensor, v: Tensor, spec: SoftmaxPV, order: Tensor, sink: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a float32 kernel, step by step, keys taken in the given order per block."""
    n, fmt = s.shape[-1], spec.weights
    block = spec.block or n
    top = torch.full_like(s[:, :1], -math.inf) if sink is None else s[:, :1] * 0 + sink
    if not spec.block:
        top = torch.maximum(top, s.amax(-1, keepdim=True))
    total = torch.zeros_like(top) if sink is None else round_to(torch.exp(sink - top), FP32)
    out = torch.zeros(s.shape[0], v.shape[1], dtype=torch.float64)
    kept = []
    for start in range(0, n, block):
        part = s[:, start : start + block]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        factor = round_to(torch.exp(round_to(top - new, FP32)).nan_to_num(1.0), FP32)
        total, out, top = round_to(total * factor, FP32), round_to(out * factor, FP32), new
        w = round_to(spec.exp(round_to(part - top, FP32)), FP32)
        for j in order[order < part.shape[1]].tolist():
            total = round_to(total + w[:, j : j + 1], FP32)
        kept.append(w)
        if spec.rounded_at == "exp":
            w = w if fmt is None else round_to(w, fmt)
            for j in order[order < part.shape[1]].tolist():
                out = round_to(out + round_to(w[:, j : j + 1] * v[start + j], FP32), FP32)
    if spec.rounded_at == "exp":
        out = round_to(out / total, FP32)
    else:
        p = round_to(torch.cat(kept, -1) / total, FP32)
        p = p if fmt is None else round_to(p, fmt)
        for j in order.tolist():
            out = round_to(out + round_to(p[:, j : j + 1] * v[j], FP32), FP32)
    return out, round_to(top + round_to(torch.log(total), FP32), FP32)


@pytest.mark.parametrize("mode", [PROB, DET], ids=lambda m: m.kind)
@pytest.mark.parametrize("weights", [None, BF16, FP16], ids=lambda f: f.name if f else "float32")
@pytest.mark.parametrize("at", ["norm", "exp"])
@pytest.mark.parametrize("known", [True, False], ids=["replayed", "free"])
@given(
    n=st.integers(1, 20),
    seed=st.integers(0, 99),
    loud=st.sampled_from([0.0, 1.0, 30.0]),
    kind=st.sampled_from(["normal", "constant", "cancelling", "offset", "one"]),
    sink=st.sampled_from([None, 0.0]),
    block=st.sampled_from([0, 8]),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_a_float32_kernel_is_covered_step_by_step(
    mode: Mode,
    weights: Format | None,
    at: str,
    known: bool,
    n: int,
    seed: int,
    loud: float,
    kind: str,
    sink: float | None,
    block: int,
) -> None:
    online = block > 0 and at == "exp" and sink is None
    s = round_to(_random(6, n, seed=seed) * loud, FP32)
    v = round_to(_random(n, 4, seed=seed + 1000), BF16)
    if kind == "constant":
        v = torch.full_like(v, 1.3125)
    elif kind == "cancelling":
        v = v.abs() * torch.where(torch.arange(n)[:, None] % 2 == 0, 1.0, -1.0)
    elif kind == "offset":
        v = round_to(v * 2.0**-6 + 1, BF16)
    elif kind == "one":
        v = v.masked_fill(torch.arange(n)[:, None] != n // 2, 0.0)
    spec = SoftmaxPV(
        exp=Exp(e0=2.0, flush=-103.0),
        weights=weights,
        rounded_at="exp" if at == "exp" else "norm",
        rounding_known=known,
        block=8 if online else 0,
    )
    logit = None if sink is None else _sink(sink)
    got = softmax_pv(exact(s), exact(v), spec, mode, logit)
    lse = log_sum_exp(exact(s), spec, mode, logit)
    orders = [
        torch.arange(n),
        torch.arange(n).flip(0),
        torch.randperm(n, generator=_generator(seed)),
    ]
    for order in orders:
        out, log = _kernel(s, v, spec, order, sink)
        assert _covered(out, got)
        assert _covered(log, lse)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(n=st.integers(2, 20), seed=st.integers(0, 99), size=st.sampled_from([1e-7, 1e-4, 1e-2]))
@QUICK
def test_stored_weights_of_uncertain_scores_are_covered(n: int, seed: int, size: float) -> None:
    s, v = _random(4, n, seed=seed), round_to(_random(n, 3, seed=seed + 1000), BF16)
    for at in ("norm", "exp"):
        spec = SoftmaxPV(weights=BF16, rounded_at="exp" if at == "exp" else "norm", block=5)
        spec = spec if at == "exp" else replace(spec, block=0)
        got = softmax_pv(MidRad(s, torch.full_like(s, size)), exact(v), spec, DET)
        for trial in range(4):
            push = (torch.rand(s.shape, generator=_generator(trial)).double() * 2 - 1) * size
            moved = round_to(s + push * 0.99, FP32) if size > 1e-6 else s
            assert _covered(_kernel(moved, v, spec, torch.arange(n))[0], got)


def test_replayed_weights_are_narrower_than_free_ones() -> None:
    s, v = round_to(_random(8, 300), FP32), round_to(_random(300, 16, seed=1), BF16)
    known = softmax_pv(exact(s), exact(v), SoftmaxPV(weights=BF16), DET)
    free = softmax_pv(exact(s), exact(v), SoftmaxPV(weights=BF16, rounding_known=False), DET)
    assert float((known.rad / free.rad).median()) < 0.05
    # One wrong weight, rounded down and not to nearest, is outside.
    p = torch.softmax(s, -1)
    assert not _covered(round_to(p * (1 - BF16.u), BF16) @ v, known)


def test_flat_values_leave_no_room_for_score_errors() -> None:
    s = _random(4, 50)
    scores = MidRad(s, torch.full_like(s, 1e-3))
    flat = softmax_pv(scores, exact(torch.ones(50, 2)), SoftmaxPV(), DET)
    mixed = softmax_pv(scores, exact(_random(50, 2, seed=1)), SoftmaxPV(), DET)
    assert float(flat.rad.max()) < 1e-5
    assert float(mixed.rad.min()) > 1e-5


@pytest.mark.parametrize("mode", [PROB, DET], ids=lambda m: m.kind)
@pytest.mark.parametrize("spec", [SoftmaxPV(), SoftmaxPV(weights=BF16, rounded_at="exp", block=2)])
def test_rows_without_keys_are_exact(mode: Mode, spec: SoftmaxPV) -> None:
    s = _random(3, 5)
    s[1] = -math.inf
    s[2, 2:] = -math.inf
    v = _random(5, 2, seed=1)
    got = softmax_pv(MidRad(s, torch.full_like(s, 1e-5)), exact(v), spec, mode)
    assert got.mid[1].tolist() == got.rad[1].tolist() == [0, 0]
    assert bool(got.rad.isfinite().all())
    lse = log_sum_exp(exact(s), spec, mode)
    assert float(lse.mid[1]) == -math.inf
    assert float(lse.rad[1]) == 0
    sunk = log_sum_exp(exact(s), spec, mode, _sink(0.25))
    assert float((sunk.mid[1] - 0.25).abs()) <= float(sunk.rad[1])


def test_hidden_keys_have_no_influence() -> None:
    s, v = _random(2, 6), _random(6, 3, seed=1)
    few = softmax_pv(exact(s[:, :4]), exact(v[:4]), EXACT, DET)
    s[:, 4:] = -math.inf
    radii = torch.zeros_like(s)
    radii[:, 4:] = 1e30
    many = softmax_pv(MidRad(s, radii), exact(v), EXACT, DET)
    assert bool(((few.mid - many.mid).abs() <= 1e-14).all())
    assert bool((many.rad <= 1e-12).all())


@pytest.mark.parametrize("bad", [(math.inf, 0.0), (0.0, math.inf), (math.nan, 0.0)])
def test_an_unbounded_score_makes_no_claim_about_its_row(bad: tuple[float, float]) -> None:
    s, r = _random(2, 4), torch.zeros(2, 4, dtype=torch.float64)
    s[0, 1], r[0, 1] = bad
    for spec in (SoftmaxPV(), SoftmaxPV(weights=FP16, rounded_at="exp", block=2)):
        for got in (
            softmax_pv(MidRad(s, r), exact(_random(4, 3)), spec, PROB),
            log_sum_exp(MidRad(s, r), spec, PROB),
        ):
            assert not bool(got.mid.isnan().any())
            assert bool(got.rad[0].isinf().all())
            assert bool(got.rad[1].isfinite().all())


def test_flushed_weights_are_covered() -> None:
    s, v = torch.tensor([[0.0, -87.2]]).double(), torch.tensor([[0.0], [1.0]]).double()
    weight = math.exp(-87.2)
    got = softmax_pv(exact(s), exact(v), SoftmaxPV(exp=Exp(flush=-87.0)), DET)
    for value in (0.0, weight):
        assert _covered(torch.tensor([[value]]).double(), got)
    got = softmax_pv(exact(s), exact(v), SoftmaxPV(exp=Exp(flush=-103.0)), DET)
    assert not _covered(torch.zeros(1, 1).double(), got)


def test_values_that_may_be_read_as_zero_are_covered() -> None:
    scores = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64)
    values = torch.tensor([[2.0**-127], [3.0], [2.0**-128]], dtype=torch.float64)
    read = torch.softmax(scores, -1) @ denormals_are_zero(values, BF16)
    spec = SoftmaxPV(pv=Accumulate(flush=True, subnormals_lost=BF16))
    got = softmax_pv(exact(scores), exact(values), spec, DET)
    assert float((read - got.mid).abs()) <= float(got.rad)
    only = torch.softmax(scores[:, :1], -1) @ denormals_are_zero(values[:1], BF16)
    got = softmax_pv(exact(scores[:, :1]), exact(values[:1]), spec, DET)
    assert float((only - got.mid).abs()) <= float(got.rad)


def test_the_cubic_exponential_is_within_its_declared_error() -> None:
    x = torch.linspace(-80, 0, 100_001, dtype=torch.float64).float().double()
    error = (cubic_exp(x) / torch.exp(x) - 1).abs()
    assert float(error.max()) < 1900 * FP32.u
    # Float32 arithmetic throughout, as the kernel has it, moves it by one spacing at most.
    y = (x.float() * torch.tensor(1.44269504088896341, dtype=torch.float32)).float()
    f = y - y.floor()
    c = torch.tensor([-0.079204240219773236, -0.22433836478672356, 0.30354260500649682])
    cubic = ((f * c[0] + c[1]) * f + c[2]) * f + 0.00010703434948458272
    bits = ((y - cubic) * 2.0**23 + 127 * 2.0**23).to(torch.int32).view(torch.float32)
    drift = (bits.double() / cubic_exp(x) - 1).abs()
    assert bool((drift <= (130 + 3 * x.abs()) * FP32.u).all())
    assert float(cubic_exp(torch.tensor([-math.inf], dtype=torch.float64))) == 0
