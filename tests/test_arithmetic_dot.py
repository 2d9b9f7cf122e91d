"""Accumulation radii cover every order of summation, simulated step by step, and real kernels."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.arithmetic.amx import TDPBF16PS, tile_product
from harness.arithmetic.dot import Accumulate, dot, partial_mean_square
from harness.arithmetic.formats import BF16, FP16, FP32, Format, denormals_are_zero, round_to
from harness.arithmetic.midrad import MidRad, exact
from harness.arithmetic.mode import DET, PROB, Mode
from harness.arithmetic.verdict import excess

Tree = int | tuple["Tree", "Tree"]
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _trees(leaves: tuple[int, ...]) -> Iterator[Tree]:
    """Every order in which these terms can be added two at a time (addition commutes)."""
    if len(leaves) == 1:
        yield leaves[0]
        return
    first, rest = leaves[0], leaves[1:]
    for mask in range(2 ** len(rest) - 1):
        left = (first, *(x for i, x in enumerate(rest) if mask >> i & 1))
        right = tuple(x for i, x in enumerate(rest) if not mask >> i & 1)
        for a in _trees(left):
            for b in _trees(right):
                yield (a, b)


def _add_up(tree: Tree, terms: Tensor, fmt: Format) -> Tensor:
    """The sum of terms [rows, n] along a tree, every node rounded."""
    if isinstance(tree, int):
        return terms[:, tree]
    left, right = _add_up(tree[0], terms, fmt), _add_up(tree[1], terms, fmt)
    return round_to(left + right, fmt)


def _covered(observed: Tensor, got: MidRad) -> bool:
    return bool(((observed - got.mid).abs() <= got.rad).all())


def test_trees_are_all_there() -> None:
    assert [len(list(_trees(tuple(range(n))))) for n in (1, 2, 3, 4, 5)] == [1, 1, 3, 15, 105]


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=lambda f: f.name)
@pytest.mark.parametrize("exact_products", [True, False], ids=("fused", "rounded"))
@given(n=st.integers(1, 5), seed=st.integers(0, 99), kind=st.sampled_from("nrczst"))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_every_summation_order_is_covered(
    fmt: Format, exact_products: bool, n: int, seed: int, kind: str
) -> None:
    rows = 24
    a, b = _random(rows, 1, n, seed=seed), _random(rows, n, 1, seed=seed + 1000)
    if kind == "c":  # cancelling
        a[:, :, n // 2 :] *= -1
        b = b.abs()
    elif kind == "z":
        a[:, :, ::2] = 0
    elif kind == "s":  # products around the smallest numbers of the accumulator
        a, b = a * math.sqrt(fmt.tiny) * 4, b * math.sqrt(fmt.tiny) * 4
    elif kind == "t":  # ties: few-bit values of very different size
        a, b = (a * 4).round() * torch.exp2(torch.arange(n) * 4.0), b * 0 + 1
    elif kind == "r":
        a, b = a.abs(), b.abs()
    # Inputs so short that their products are exact in float64, and in float32.
    a, b = round_to(a, BF16), round_to(b, BF16)
    spec = Accumulate(format=fmt, order="any", exact_products=exact_products, epilogue=0)
    got = dot(exact(a), exact(b), spec, DET)
    products = (a * b.mT)[:, 0]
    products = products if exact_products else round_to(products, fmt)
    for tree in _trees(tuple(range(n))):
        assert _covered(_add_up(tree, products, fmt)[:, None, None], got)


@pytest.mark.parametrize("fmt", [FP32, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("lanes", [2, 4, 8])
@given(n=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_interleaved_lanes_are_covered_by_their_own_depth(
    fmt: Format, lanes: int, n: int, seed: int
) -> None:
    a = round_to(_random(16, 1, n, seed=seed), BF16)
    got = dot(
        exact(a),
        exact(torch.ones(n, 1)),
        Accumulate(format=fmt, order=f"lanes{lanes}", exact_products=True, epilogue=0),
        DET,
    )
    whole = n // lanes * lanes
    running = torch.zeros(16, lanes, dtype=torch.float64)
    for start in range(0, whole, lanes):
        running = round_to(running + a[:, 0, start : start + lanes], fmt)
    while running.shape[1] > 1:  # horizontally, as a tree
        half = running.shape[1] // 2
        running = round_to(running[:, :half] + running[:, half:], fmt)
    total = running[:, 0]
    for k in range(whole, n):
        total = round_to(total + a[:, 0, k], fmt)
    assert _covered(total[:, None, None], got)


@given(n=st.integers(1, 60), seed=st.integers(0, 99), shift=st.integers(0, 8))
@QUICK
def test_pairwise_sums_are_covered_by_their_own_depth(n: int, seed: int, shift: int) -> None:
    a = _random(16, 1, n, seed=seed) + shift
    a = round_to(a, BF16)
    spec = Accumulate(order="pairwise", exact_products=True, epilogue=0)
    got = dot(exact(a), exact(torch.ones(n, 1)), spec, DET)
    level = [a[:, 0, k] for k in range(n)]
    while len(level) > 1:
        paired = [round_to(x + y, FP32) for x, y in zip(level[::2], level[1::2], strict=False)]
        level = paired + ([level[-1]] if len(level) % 2 else [])
    assert _covered(level[0][:, None, None], got)


def test_flushed_products_are_covered_only_if_declared() -> None:
    a, b = torch.full((1, 1, 3), 2.0**-70), torch.full((1, 3, 1), 2.0**-60)
    keeps = Accumulate(exact_products=True)
    flushes = replace(keeps, flush=True)
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    assert _covered(zero, dot(exact(a), exact(b), flushes, DET))
    assert not _covered(zero, dot(exact(a), exact(b), keeps, DET))


def test_a_sum_that_may_overflow_claims_nothing() -> None:
    a = torch.tensor([[[3e4, 3e4, -3e4]]])
    got = dot(exact(a), exact(torch.ones(3, 1)), Accumulate(format=FP16), DET)
    assert float(got.rad) == math.inf
    wide = dot(exact(a), exact(torch.ones(3, 1)), Accumulate(format=FP32), DET)
    assert math.isfinite(float(wide.rad))


@given(n=st.integers(2, 200), seed=st.integers(0, 99), kind=st.sampled_from("ncsp"))
@QUICK
def test_prob_is_never_wider_than_det(n: int, seed: int, kind: str) -> None:
    a, b = _random(3, n, seed=seed), _random(n, 4, seed=seed + 1000)
    if kind == "c":
        a, b = torch.full_like(a, 0.3), torch.full_like(b, 0.7)
    elif kind == "s":
        a = a.sort(-1).values
    elif kind == "p":
        a, b = a.abs(), b.abs()
    left, right = MidRad(a, a.abs() * 2.0**-20), MidRad(b, b.abs() * 2.0**-22)
    for order in ("any", "simd8", "pairwise", "amx"):
        spec = Accumulate(order=order)
        prob, det = dot(left, right, spec, PROB), dot(left, right, spec, DET)
        assert torch.equal(prob.mid, det.mid)
        assert bool((prob.rad <= det.rad).all())


@pytest.mark.parametrize("mode", [PROB, DET], ids=lambda m: m.kind)
def test_the_radius_grows_with_the_declared_depth(mode: Mode) -> None:
    a, b = exact(_random(4, 300)), exact(_random(300, 4, seed=1))
    specs = [Accumulate(order=order) for order in ("simd8", "lanes4", "lanes2", "any")]
    specs += [replace(specs[-1], epilogue=4), replace(specs[-1], epilogue=40)]
    depths = [spec.depth(300) for spec in specs]
    assert depths == sorted(depths)
    radii = [dot(a, b, spec, mode).rad for spec in specs]
    assert all(bool((x <= y).all()) for x, y in itertools.pairwise(radii))
    assert bool((radii[0] < radii[-1]).all())


def test_constant_terms_take_the_provable_radius() -> None:
    # Equal terms: every rounding error has the same sign, so they do not average out.
    a, b = torch.full((1, 4096), 0.1).double(), torch.full((4096, 1), 0.7).double()
    a, b = round_to(a, FP32), round_to(b, FP32)
    prob, det = (dot(exact(a), exact(b), Accumulate(), mode) for mode in (PROB, DET))
    assert torch.equal(prob.rad, det.rad)
    total = torch.zeros(1, 1, dtype=torch.float64)
    for k in range(4096):
        total = round_to(total + round_to(a[:, k : k + 1] * b[k], FP32), FP32)
    assert _covered(total, prob)
    spread = dot(exact(_random(1, 4096)), exact(_random(4096, 1, seed=1)), Accumulate(), PROB)
    assert float(spread.rad) < 0.1 * float(
        dot(exact(_random(1, 4096)), exact(_random(4096, 1, seed=1)), Accumulate(), DET).rad
    )


@pytest.mark.parametrize("kind", ["sorted", "signs", "alternating", "geometric", "huge"])
@pytest.mark.parametrize("strided", [1, 8])
def test_ordered_terms_are_covered_by_prob(kind: str, strided: int) -> None:
    n = 2048
    a = torch.rand(64, n, generator=torch.Generator().manual_seed(5)).double() + 0.5
    if kind == "sorted":
        a = _random(64, n).sort(-1).values
    elif kind == "signs":
        a[:, n // 2 :] *= -1
    elif kind == "alternating":
        a = a * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)
    elif kind == "geometric":
        a = a * torch.exp2(-(torch.arange(n) % 40).double())
    else:
        a[:, 0], a[:, -1] = 2.0**24, -(2.0**24)
    a = round_to(a, FP32)
    got = dot(exact(a), exact(torch.ones(n, 1)), Accumulate(exact_products=True), PROB)
    lanes = torch.zeros(64, strided, dtype=torch.float64)
    for k in range(0, n, strided):
        lanes = round_to(lanes + a[:, k : k + strided], FP32)
    total = lanes[:, 0]
    for lane in range(1, strided):
        total = round_to(total + lanes[:, lane], FP32)
    assert _covered(total[:, None], got)


def test_partial_sums_do_not_depend_on_the_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _random(2, 3, 101), _random(2, 101, 5, seed=1)
    batched = partial_mean_square(a, b)
    monkeypatch.setattr("harness.arithmetic.dot._BATCHED_LIMIT", 0)
    looped = partial_mean_square(a, b)
    # Two float64 evaluations of <= 16 * 101 terms each.
    assert bool(((batched - looped).abs() <= 2.0**-40 * batched).all())


@given(n=st.integers(1, 8), seed=st.integers(0, 99), ra=st.floats(0, 1), rb=st.floats(0, 1))
@QUICK
def test_operand_radii_are_covered_at_every_corner(n: int, seed: int, ra: float, rb: float) -> None:
    a, b = _random(2, n, seed=seed), _random(n, 2, seed=seed + 1000)
    got = dot(
        MidRad(a, torch.full_like(a, ra)), MidRad(b, torch.full_like(b, rb)), Accumulate(), DET
    )
    for i in range(2):
        for j in range(2):
            # The worst corner moves every term the same way, for either sign.
            for sign in (1.0, -1.0):
                corners = [
                    (a[i] + da * ra) * (b[:, j] + db * rb) * sign
                    for da in (-1.0, 1.0)
                    for db in (-1.0, 1.0)
                ]
                best = torch.stack(corners).amax(0)
                assert abs(float(best.sum()) * sign - float(got.mid[i, j])) <= float(got.rad[i, j])


@pytest.mark.parametrize("depth", [1, 2, 31, 33, 64, 200])
@pytest.mark.parametrize("exponent", [0, -64])
@pytest.mark.parametrize("mode", [PROB, DET], ids=lambda m: m.kind)
def test_the_amx_emulator_stays_within_its_declaration(
    depth: int, exponent: int, mode: Mode
) -> None:
    # At 2^-64 the products straddle 2^-127: flushing to zero matters.
    a = round_to(_random(8, depth) * 2.0**exponent, BF16)
    b = round_to(_random(depth, 8, seed=1) * 2.0**exponent, BF16)
    left, right = (denormals_are_zero(x, BF16) for x in (a, b))
    got = dot(exact(left), exact(right), TDPBF16PS, mode)
    tile = tile_product(a, b)
    assert torch.equal(tile, round_to(tile, FP32))
    assert bool((excess(tile, got, FP32) <= 1).all())
    assert bool((excess(round_to(tile, BF16), got, BF16) <= 1).all())


def test_undeclared_flushing_is_found() -> None:
    a = round_to(_random(8, 64) * 2.0**-64, BF16)
    b = round_to(_random(64, 8, seed=1) * 2.0**-64, BF16)
    keeps = replace(TDPBF16PS, flush=False)
    assert bool((excess(tile_product(a, b), dot(exact(a), exact(b), keeps, DET), FP32) > 1).any())


def test_amx_reads_subnormals_as_zero_and_keeps_two_chains() -> None:
    one = torch.ones(1, 1)
    assert float(tile_product(one * BF16.min_normal / 2, one * 2.0**100)) == 0
    # In one chain 1 + 2^-24 - 1 leaves 0 (a tie to even); odd products have a chain of their own.
    a = torch.tensor([[1.0, 2.0**-24, -1.0, 0.0]])
    assert float(tile_product(a, torch.ones(4, 1))) == 2.0**-24
    assert float(tile_product(a[:, [0, 2, 1, 3]], torch.ones(4, 1))) == 0
    # The next slice of 32 products is added to the finished tile.
    b = torch.zeros(1, 64)
    b[0, 0], b[0, 32], b[0, 34] = 1.0, 2.0**-24, 2.0**-24
    assert float(tile_product(b, torch.ones(64, 1))) == 1 + 2.0**-23


@pytest.mark.parametrize("mode", [PROB, DET], ids=lambda m: m.kind)
def test_factors_that_may_be_read_as_zero_are_covered_either_way(mode: Mode) -> None:
    tiny = round_to(_random(6, 40) * BF16.min_normal, BF16)
    loud = round_to(_random(40, 5, seed=1) * 2.0**40, BF16)
    keeps = Accumulate(order="any", exact_products=True, flush=True)
    loses = replace(keeps, subnormals_lost=BF16)
    for a, b in ((tiny, loud), (loud.mT, tiny.mT)):
        read = denormals_are_zero(a, BF16) @ denormals_are_zero(b, BF16)
        assert not _covered(read, dot(exact(a), exact(b), keeps, mode))
        assert _covered(read, dot(exact(a), exact(b), loses, mode))
        assert _covered(a @ b, dot(exact(a), exact(b), loses, mode))
    normal = round_to(_random(6, 40), BF16)
    assert torch.equal(
        dot(exact(normal), exact(loud), keeps, mode).rad,
        dot(exact(normal), exact(loud), loses, mode).rad,
    )


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(ValueError, match="order='random' is unknown"):
        Accumulate(order="random")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", [PROB, DET], ids=lambda m: m.kind)
def test_torch_bmm_is_covered(dtype: torch.dtype, mode: Mode) -> None:
    for seed, (m, k, n) in enumerate([(1, 1, 1), (3, 31, 17), (16, 576, 33), (5, 1536, 8)]):
        a, b = _random(2, m, k, seed=seed).to(dtype), _random(2, k, n, seed=seed + 50).to(dtype)
        got = dot(exact(a), exact(b), Accumulate(), mode)
        assert bool((excess(torch.bmm(a, b), got) <= 1).all())
        wrong = torch.bmm(a[..., : max(1, k - 1)], b[:, : max(1, k - 1)])
        assert k == 1 or bool((excess(wrong, got) > 1).any())
