"""The runner on trial: answers that must not pass, and what is said of each."""

import dataclasses

import pytest
import torch

from cases.sdpa import SdpaCase
from harness.arithmetic.midrad import MidRad
from harness.engines.torch.sdpa import MATH
from harness.lane import Presence, Tier
from harness.power import planted
from harness.programs import sdpa as programs
from harness.record import Status
from harness.run import judge

CASE = SdpaCase(
    dtype="bfloat16", seed=8, values="normal", batch=2, q_len=3, kv_len=40, heads=4, kv_heads=2,
    head_dim=16, causal=True,
)  # fmt: skip
RIGHT = planted.faithful("sdpa", MATH)


def verdict(run, case=CASE, **more):
    return judge(case, planted.cell("sdpa", run, MATH, **more))


def test_a_perfect_subject_agrees_bit_for_bit():
    record = verdict(RIGHT)
    assert record.status is Status.AGREE
    assert record.excess == 0
    assert record.exact == record.elements == 2 * 4 * 3 * 16


def edited(change):
    def run(case, t):
        out = RIGHT(case, t)
        return change(out, t)

    return run


def last_element(out, t):
    out["out"].view(-1)[-1] += 0.5
    return out


def poke(value):
    def change(out, t):
        out["out"].view(-1)[17] = value
        return out

    return change


def writes_into_k(out, t):
    t["k"][0, 0, 0, 0] = 7.0
    return out


@pytest.mark.parametrize(
    ("run", "status", "words"),
    [
        pytest.param(lambda case, t: {"out": t["q"]}, Status.DISAGREE, "x what", id="its-input"),
        pytest.param(
            edited(lambda out, t: {"out": torch.zeros_like(out["out"])}),
            Status.DISAGREE, "expected", id="zeros",
        ),
        pytest.param(edited(poke(float("nan"))), Status.DISAGREE, "nan", id="nan"),
        pytest.param(edited(poke(float("inf"))), Status.DISAGREE, "inf", id="inf"),
        pytest.param(edited(last_element), Status.DISAGREE, "[1, 3, 2, 15]", id="last-element"),
        pytest.param(
            edited(lambda out, t: {"out": out["out"].float()}),
            Status.DISAGREE, "dtype float32, expected bfloat16", id="dtype",
        ),
        pytest.param(
            edited(lambda out, t: {"out": out["out"][:1]}),
            Status.DISAGREE, "shape [1, 4, 3, 16], expected [2, 4, 3, 16]", id="shape",
        ),
        pytest.param(
            edited(lambda out, t: {"out": out["out"][..., :0]}),
            Status.DISAGREE, "shape", id="empty",
        ),
        pytest.param(lambda case, t: {}, Status.DISAGREE, "output out is missing", id="nothing"),
        pytest.param(lambda case, t: None, Status.DISAGREE, "returned NoneType", id="none"),
        pytest.param(
            lambda case, t: RIGHT(case, t)["out"], Status.DISAGREE, "returned Tensor", id="tensor"
        ),
        pytest.param(
            lambda case, t: (x for x in ()), Status.DISAGREE, "returned generator", id="generator"
        ),
        pytest.param(
            edited(lambda out, t: {"out": out["out"].tolist()}),
            Status.DISAGREE, "expected a torch.Tensor, got list", id="list",
        ),
        pytest.param(
            edited(lambda out, t: {**out, "lse": out["out"]}),
            Status.DISAGREE, "lse was not asked for", id="extra",
        ),
        pytest.param(
            edited(writes_into_k), Status.DISAGREE, "changed its input k", id="writes-input"
        ),
        pytest.param(lambda case, t: 1 / 0, Status.ERROR, "ZeroDivisionError", id="raises"),
    ],
)  # fmt: skip
def test_a_wrong_answer_does_not_pass(run, status, words):
    record = verdict(run)
    assert record.status is status
    assert words in record.why
    assert record.excess > 1


def test_one_output_of_two_does_not_pass():
    case = dataclasses.replace(CASE, lse=True)
    record = verdict(edited(lambda out, t: {"out": out["out"]}), case)
    assert record.status is Status.DISAGREE
    assert "output lse is missing" in record.why


def test_what_is_kept_of_a_shape_is_not_kept_of_its_values():
    """A kernel that packs K once for each shape is right in every call alone."""
    packed = {}

    def run(case, tensors):
        k = packed.setdefault(tensors["k"].shape, tensors["k"])
        return RIGHT(case, {**tensors, "k": k})

    record = verdict(run)
    assert record.status is Status.DISAGREE
    packed.clear()
    assert verdict(run, dataclasses.replace(CASE, seed=9)).status is Status.AGREE


@pytest.mark.parametrize(
    "buffer", [None, torch.empty(0, dtype=torch.bfloat16)], ids=["fresh", "in-one-buffer"]
)
def test_an_answer_that_depends_on_the_call_before_does_not_pass(buffer):
    """Also where every call writes its answer over the one before, as captured graphs do."""
    calls = []

    def run(case, t):
        calls.append(case)
        out = RIGHT(case, t)["out"]
        if len(calls) > 2:  # the first call has other values, and is not judged
            out = torch.nextafter(out, torch.ones_like(out))
        return {"out": out if buffer is None else buffer.resize_(out.shape).copy_(out)}

    record = verdict(run)
    assert record.status is Status.DISAGREE
    assert "differs between two calls" in record.why


def test_another_kernel_than_the_one_meant_is_an_error():
    record = verdict(RIGHT, kernels=("aten::_flash_of_another_name",))
    assert record.status is Status.ERROR
    assert "aten::_flash_of_another_name did not run; ran: " in record.why


def test_a_refusal_is_declared_and_recorded():
    record = verdict(RIGHT, claims=frozenset())
    assert (record.status, record.why) == (Status.REFUSED, "causal not claimed")
    record = verdict(RIGHT, dtypes=("float32",))
    assert (record.status, record.why) == (Status.REFUSED, "bfloat16 is not supported")
    record = verdict(RIGHT, refusal=lambda case: "only on Tuesdays")
    assert (record.status, record.why) == (Status.REFUSED, "only on Tuesdays")


def test_a_vacuous_case_is_not_judged():
    case = dataclasses.replace(CASE, window=41)
    record = verdict(lambda case, t: {}, case)
    assert record.status is Status.VACUOUS
    assert "no key is clipped" in record.why


def test_an_absent_cell_runs_nothing():
    cell = planted.cell("sdpa", lambda case, t: 1 / 0)
    gone = dataclasses.replace(cell, presence=Presence(tier=Tier.ABSENT, reason="no such lane"))
    record = judge(CASE, gone)
    assert (record.status, record.why) == (Status.ABSENT, "no such lane")


HF = programs.program(programs.HF_EAGER)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("declared", "really"),
    [
        pytest.param(HF, MATH, id="weights-kept-in-float32"),
        pytest.param(MATH, HF, id="scores-and-weights-in-the-dtype"),
    ],
)
def test_rounding_elsewhere_is_drift_and_not_disagreement(declared, really, dtype):
    case = dataclasses.replace(CASE, dtype=dtype, kv_len=100, seed=3)
    record = judge(case, planted.cell("sdpa", planted.faithful("sdpa", really), declared))
    assert record.status is Status.DRIFT
    assert "rounds elsewhere than declared" in record.why


def test_outside_prob_and_inside_det_is_suspect_unless_it_repeats():
    """A program whose prob radius is zero on one seed only: nothing repeats with fresh values."""

    def program(case, inputs, mode):
        out = MATH(case, inputs, mode)
        if mode.kind == "prob" and case.seed == CASE.seed:
            out = {name: MidRad(x.mid + 1.0) for name, x in out.items()}
        return out

    record = judge(CASE, planted.cell("sdpa", RIGHT, program))
    assert record.status is Status.SUSPECT
    assert "not repeated with 3 fresh seeds" in record.why

    def always(case, inputs, mode):
        out = MATH(case, inputs, mode)
        if mode.kind == "prob":
            out = {name: MidRad(x.mid + 1.0) for name, x in out.items()}
        return out

    assert judge(CASE, planted.cell("sdpa", RIGHT, always)).status is Status.DRIFT
