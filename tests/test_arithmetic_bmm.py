"""The arithmetic of matrix products: exact where whole numbers are, honest, and able to name."""

import pytest
import torch
from hypothesis import given, settings

from cases import bmm as cases
from cases import defects
from harness import engines, faults
from harness.arithmetic.dot import Accumulate
from harness.arithmetic.mode import DET
from harness.programs.bmm import BmmArithmetic, by_dtype, envelope
from harness.subject import Program

FLOATS = ("float32", "bfloat16", "float16")
FEATURES = frozenset(cases.FEATURES) - {"codes"}
DECLARED = [
    (subject.name, program)
    for engine in engines.NAMES
    if engines.absent(engine) is None
    for subject in engines.subjects(engine, "bmm")
    for program in subject.programs.values()
]
PROGRAMS = [pytest.param(program, id=name) for name, program in DECLARED]


def _case(**fields) -> cases.BmmCase:
    plain = {"dtype": "bfloat16", "seed": 2, "values": "integers", "batch": 2, "m": 5, "n": 7}
    return cases.BmmCase(**{**plain, "k": 600, **fields})


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_whole_numbers_leave_no_tolerance(program: Program, dtype: str) -> None:
    """By the general argument on bits, not by the fill's name."""
    case = _case(dtype=dtype)
    inputs = case.inputs()
    allowed = program(case, inputs, DET)["out"]
    assert not allowed.rad.any()
    assert torch.equal(allowed.mid, case.expected(inputs)["out"])


@pytest.mark.parametrize("dtype", FLOATS)
def test_real_numbers_leave_some(dtype: str) -> None:
    case = _case(dtype=dtype, values="normal")
    assert (by_dtype(Accumulate(order="any"))(case, case.inputs(), DET)["out"].rad > 0).all()


def test_the_envelope_is_exact_on_whole_numbers_too() -> None:
    case = _case()
    assert not envelope(case, case.inputs(), DET)["out"].rad.any()


def test_exactness_ends_where_the_accumulator_does() -> None:
    """Sums of 2**24 units are exact; with a unit more they may not be."""
    program = BmmArithmetic(accumulate=Accumulate(order="any"))
    for extra, exact in ((0.0, True), (1.0, False)):
        case = _case(dtype="float32", batch=1, m=1, n=1, k=3)
        inputs = {
            "a": torch.tensor([[[2.0**23, 2.0**23 - 1, 1 + extra]]]),
            "b": torch.ones(1, 3, 1),
        }
        assert bool((program(case, inputs, DET)["out"].rad == 0).all()) == exact


def test_a_sum_that_underflows_is_not_exact() -> None:
    case = _case(batch=1, m=1, n=1, k=2)
    inputs = {"a": torch.full((1, 1, 2), 2.0**-70), "b": torch.full((1, 2, 1), 2.0**-60)}
    gradual = BmmArithmetic(accumulate=Accumulate(order="any"))
    flushing = BmmArithmetic(accumulate=Accumulate(order="any", flush=True))
    assert not gradual(case, inputs, DET)["out"].rad.any()
    assert flushing(case, inputs, DET)["out"].rad.all()


@settings(deadline=None, max_examples=150)
@given(cases.strategy(FEATURES, cases.DTYPES))
def test_no_program_hides_a_bug(case: cases.BmmCase) -> None:
    """What a program expects differs from the meaning by no more than the dtypes explain."""
    inputs = case.inputs()
    right, bound = case.expected(inputs)["out"], envelope(case, inputs, DET)["out"]
    assert ((bound.mid - right).abs() <= bound.rad).all()
    for _, program in DECLARED:
        mid = program(case, inputs, DET)["out"].mid
        assert ((mid - right).abs() <= bound.rad).all()


@settings(deadline=None, max_examples=60)
@given(cases.strategy(FEATURES, FLOATS))
def test_any_order_of_float32_addition_stays_within(case: cases.BmmCase) -> None:
    """Forwards, backwards, by halves: rounded after every operation."""
    inputs = case.inputs()
    allowed = by_dtype(Accumulate(order="any"))(case, inputs, DET)["out"]
    a, b = inputs["a"].float()[:1, :2], inputs["b"].float()[:1, :, :3]
    c = inputs["c"].float().expand(case.batch, case.m, case.n)[:1, :2, :3] if case.addend else None
    products = a[..., None] * b[:, None]  # [1, rows, k, columns]
    orders = {"forwards": products.unbind(2), "backwards": products.flip(2).unbind(2)}
    for terms in orders.values():
        total = torch.zeros_like(terms[0])
        for term in terms:
            total = total + term
        out = total * case.alpha if case.alpha != 1 else total
        out = out if c is None else out + c * case.beta
        distance = (out.double() - allowed.mid[:1, :2, :3]).abs()
        assert (distance <= allowed.rad[:1, :2, :3]).all()


NAMED = [d.name for d in defects.load("bmm")]
INT8 = ("int8-pairs-saturate", "int8-compensation-missing")
SETTINGS: dict[str, dict] = {
    "panel-width": {"n": 48},
    "padding-of-a-whole-block": {"k": 128},
    "stale-tile-rows": {"m": 37},
    "bias-down-the-rows": {"addend": "row"},
}


@pytest.mark.parametrize("name", NAMED)
def test_the_matched_filter_names_the_planted_fault(name: str) -> None:
    """Among all faults, from the envelope alone, on the reference's own faulty answer."""
    [defect] = [d for d in defects.load("bmm") if d.name == name]
    fields: dict = {"batch": 3, "m": 40, "n": 43, "k": 101, "values": "normal"}
    if name in INT8:
        fields |= {"dtype": "int8", "values": "range"}
    elif name == "blocks-of-scales":
        fields |= {"codes": True}
    else:
        fields |= {"alpha": -1.5, "addend": "full", "beta": 0.5, "a_layout": "interleaved"}
    case = _case(**{**fields, **SETTINGS.get(name, {})})
    inputs = case.inputs()
    wrong = defect.answer(case, inputs)
    assert wrong is not None
    observed = {"out": wrong["out"].to(getattr(torch, case.output_dtypes()["out"]))}
    fault = faults.name(case, inputs, observed, envelope(case, inputs, DET), defects.load("bmm"))
    assert fault is not None
    assert fault.defect.name == name
