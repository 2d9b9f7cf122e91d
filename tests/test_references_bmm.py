"""The reference matrix product: equal to transformers' layer, to exact integers, and its words."""

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import bmm as cases
from references.bmm import bmm
from references.hf import bmm as witness

UNIT = 2.0**-53

sizes = st.tuples(*(st.integers(1, 9),) * 4)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(sizes, st.booleans(), st.integers(0, 99))
def test_agrees_with_transformers_own_layer(shape, biased: bool, seed: int) -> None:
    """Two float64 sums of k products and a bias differ by at most 2 (k + 1) u sum |t| (to first
    order, 1 more for the higher ones)."""
    batch, m, n, k = shape
    a, b = _normal(batch, m, k, seed=seed), _normal(batch, k, n, seed=seed + 1)
    c = _normal(n, seed=seed + 2) if biased else None
    size = a.abs() @ b.abs() + (0 if c is None else c.abs())
    gap = (bmm(a, b, c=c) - witness.bmm(a, b, c=c)).abs()
    assert bool((gap <= 2 * (k + 2) * UNIT * size).all())


@settings(deadline=None, max_examples=30)
@given(sizes, st.integers(0, 99), st.sampled_from((1.0, -1.5, 0.125)), st.sampled_from((1.0, 0.5)))
def test_is_exact_on_integers(shape, seed: int, alpha: float, beta: float) -> None:
    batch, m, n, k = shape
    draw = torch.Generator().manual_seed(seed)
    a = torch.randint(-128, 128, (batch, m, k), generator=draw, dtype=torch.int8)
    b = torch.randint(-128, 128, (batch, k, n), generator=draw, dtype=torch.int8)
    c = torch.randint(-999, 999, (batch, m, n), generator=draw, dtype=torch.int32)
    out = bmm(a, b, alpha=alpha, c=c, beta=beta)
    for i in range(batch):
        rows, columns = a[i].tolist(), b[i].mT.tolist()
        for r, s in itertools.product(range(m), range(n)):
            total = sum(x * y for x, y in zip(rows[r], columns[s], strict=True))
            expected = Fraction(alpha) * total + Fraction(beta) * int(c[i, r, s])
            assert Fraction(out[i, r, s].item()) == expected


def test_strides_do_not_matter_and_gaps_are_not_read() -> None:
    wide = torch.full((2, 5, 9), torch.nan)
    wide[..., 2:5] = torch.arange(30.0).view(2, 5, 3)
    a, b = wide[..., 2:5], wide[..., 2:5].mT
    assert torch.equal(bmm(a, b), bmm(a.contiguous(), b.contiguous()))
    one = torch.ones(1, 3, 2)
    assert torch.equal(bmm(a, one.expand(2, 3, 2)), bmm(a, one.repeat(2, 1, 1)))


def test_alpha_scales_the_product_and_beta_the_addend() -> None:
    a, b, c = torch.tensor([[[3.0]]]), torch.tensor([[[5.0]]]), torch.tensor([[[7.0]]])
    assert bmm(a, b, alpha=2, c=c, beta=10).item() == 2 * 15 + 10 * 7
    assert bmm(a, b, alpha=2, beta=10).item() == 30


def test_an_addend_with_beta_0_is_not_read() -> None:
    a = torch.ones(1, 2, 2)
    nan = torch.full((2,), torch.nan)
    assert torch.equal(bmm(a, a, c=nan, beta=0), torch.full((1, 2, 2), 2.0).double())
    assert bmm(a, a, c=nan).isnan().all()


def test_empty_depth_is_zero() -> None:
    a, b = torch.ones(1, 2, 0), torch.ones(1, 0, 3)
    assert torch.equal(bmm(a, b), torch.zeros(1, 2, 3).double())
    assert torch.equal(bmm(a, b, c=torch.ones(3)), torch.ones(1, 2, 3).double())


def test_int8_holds_what_would_saturate() -> None:
    low = torch.full((1, 1, 130), -128, dtype=torch.int8)
    assert bmm(low, low.mT).item() == 130 * 2**14


def test_subnormals_count() -> None:
    tiny = torch.full((1, 1, 1), 2.0**-133, dtype=torch.bfloat16)
    assert bmm(tiny, tiny).item() == 2.0**-266


ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"a": torch.ones(3, 4)}, r"a has shape \(3, 4\).*expected 3 axes.*pass"),
        ({"b": torch.ones(2, 5, 3)}, r"b \(2, 5, 3\): pass \[B, M, K\]"),
        ({"b": torch.ones(1, 4, 3)}, r"expand a batch of 1 yourself"),
        ({"c": torch.ones(4)}, r"c has shape \(4,\), expected one that broadcasts to \(2, 3, 3\)"),
        ({"c": torch.ones(5, 2, 3, 3)}, r"c has shape \(5, 2, 3, 3\), expected"),
    ],
)
def test_bad_input_names_value_expectation_and_remedy(changed: dict, words: str) -> None:
    inputs: dict[str, Any] = {"a": ONES, "b": ONES.mT} | changed
    with pytest.raises(ValueError, match=words):
        bmm(**inputs)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_layout_changes_strides_alone(layout: str, dtype: str) -> None:
    """The values are those of the contiguous case, whatever stands in the gaps."""
    fill = "range" if dtype == "int8" else "normal"
    plain = cases.BmmCase(dtype=dtype, seed=3, values=fill, batch=2, m=3, n=5, k=4)
    x = plain.inputs()["a"]
    laid = cases.BmmCase(
        dtype=dtype, seed=3, values=fill, batch=2, m=3, n=5, k=4, a_layout=layout
    ).inputs()["a"]
    expected = x[:1].expand_as(x) if layout == "broadcast" else x
    assert torch.equal(laid, expected)
    assert (laid.stride() == x.stride()) == (layout in ("contiguous", "offset"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes_say_what_b_is(dtype: str) -> None:
    case = cases.BmmCase(dtype=dtype, seed=4, values="normal", batch=2, m=1, n=3, k=70, codes=True)
    inputs = case.inputs()
    scale = inputs["scales"].double().repeat_interleave(32, -1)[..., :70]
    assert torch.equal(inputs["b"].double().mT, (inputs["codes"].double() - 128) * scale)
