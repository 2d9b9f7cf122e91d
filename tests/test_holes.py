"""How other harnesses pass a wrong answer: each hole as they have it, and ours, which rejects it.

Every `passes_...` is the heart of a check that a published harness uses. The test shows that it
accepts the wrong answer, so that the hole is real, and that our comparator, runner or gate do not.
"""

import asyncio
import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.sdpa import SdpaCase
from harness import gate, programs
from harness.arithmetic.midrad import MidRad
from harness.compare import Verdict, compare
from harness.power import planted
from harness.profiles import PROFILES, Profile
from harness.record import Record, Status
from harness.run import judge
from harness.rundir import RunError, latest, open_run, read_run
from harness.search import search

Tensor = torch.Tensor
NAN, INF = math.nan, math.inf


def ours(got: Tensor, want: Tensor, allowed: float = 1e-3) -> Verdict:
    """Our comparator on one output, with a radius of `allowed` everywhere."""
    bound = MidRad(want.double(), torch.full(want.shape, allowed, dtype=torch.float64))
    return compare({"out": got.float()}, {"out": bound}, {})


# What is compared --------------------------------------------------------------------------------


def passes_by_greater(got: Tensor, want: Tensor) -> bool:
    """Fails if some error is greater than the tolerance: no NaN ever is."""
    return not bool(((got - want).abs() > 1e-3).any())


def passes_finite_for_inf(got: Tensor, want: Tensor) -> bool:
    """Elements whose reference is not finite are left out."""
    finite = want.isfinite()
    return torch.allclose(got[finite], want[finite])


def passes_by_share(got: Tensor, want: Tensor) -> bool:
    """Enough when 80 % of the rows are right."""
    rows = ((got - want).abs() <= 1e-3).all(-1)
    return float(rows.double().mean()) >= 0.8


def passes_by_mean(got: Tensor, want: Tensor) -> bool:
    """The root mean square error over all elements, relative to that of the reference."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt()) < 5e-3


def passes_by_cosine(got: Tensor, want: Tensor) -> bool:
    return float(torch.cosine_similarity(got.flatten(), want.flatten(), dim=0)) > 0.99


def passes_either_way(got: Tensor, want: Tensor) -> bool:
    """Fails only where the absolute and the relative error are both too large."""
    error = (got - want).abs()
    return not bool(((error > 1e-2) & (error / want.abs() > 1e-2)).any())


def passes_whatever(got: Tensor, want: Tensor, atol: float = 1e-9, rtol: float = 1e-9) -> bool:
    """Takes tolerances and does not hand them on."""
    del atol, rtol
    return torch.allclose(got, want, rtol=1e-2)


def passes_returning_early(got: Tensor, want: Tensor) -> bool:
    """Means to skip what is special, and has the condition the wrong way round."""
    for g, w in zip(got.tolist(), want.tolist(), strict=True):
        if math.isfinite(w):
            continue
        if g != w:
            return False
    return True


def passes_empty(got: Tensor, want: Tensor) -> bool:
    """The largest error of no element is no error."""
    error = (got - want[: len(got)]).abs()
    return error.numel() == 0 or float(error.max()) <= 1e-3


ONE_OF_MANY = torch.ones(1000, 1000)
ONE_WRONG = ONE_OF_MANY.clone()
ONE_WRONG[123, 456] = 4
ROWS = torch.ones(10, 4)
ROWS_WRONG = ROWS.clone()
ROWS_WRONG[3:5] = 7

ACCEPTED = (
    ("nan-compared-with-greater", passes_by_greater, [NAN, 1.0], [1.0, 1.0]),
    ("nan-in-the-oracle", passes_by_greater, [1.0, 1.0], [NAN, 1.0]),
    ("finite-for-inf", passes_finite_for_inf, [3e38, 1.0], [INF, 1.0]),
    ("inf-of-the-other-sign", passes_finite_for_inf, [-INF, 1.0], [INF, 1.0]),
    ("inverted-early-return", passes_returning_early, [99.0, 99.0], [1.0, 2.0]),
    ("eighty-percent-of-the-rows", passes_by_share, ROWS_WRONG, ROWS),
    ("a-mean-hides-one-element", passes_by_mean, ONE_WRONG, ONE_OF_MANY),
    ("a-cosine-hides-one-element", passes_by_cosine, ONE_WRONG, ONE_OF_MANY),
    ("a-cosine-hides-a-scale", passes_by_cosine, 3 * ROWS, ROWS),
    ("absolute-and-relative-both", passes_either_way, [0.0105], [0.001]),
    ("ignored-tolerances", passes_whatever, [1.009], [1.0]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "got", "want"), [pytest.param(*row[1:], id=row[0]) for row in ACCEPTED]
)
def test_a_wrong_answer_that_they_accept_is_rejected(theirs, got, want):
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    assert theirs(got, want)
    verdict = ours(got, want)
    assert not verdict.allowed
    assert verdict.why


def test_an_empty_tensor_is_no_right_answer():
    nothing = torch.zeros(0)
    assert passes_empty(nothing, torch.ones(3))
    assert not ours(nothing, nothing).allowed
    record = put(lambda case, t: {**RIGHT(case, t), "out": t["q"][..., :0]})
    assert (record.status, "has shape" in record.why) == (Status.DISAGREE, True)


# What is run -------------------------------------------------------------------------------------

CASE = SdpaCase(
    dtype="float32", seed=9, values="normal", batch=1, q_len=2, kv_len=5, heads=2, kv_heads=1,
    head_dim=8, causal=True, lse=True,
)  # fmt: skip
RIGHT = planted.faithful("sdpa")


def put(run: Any, case: SdpaCase = CASE) -> Record:
    return judge(case, planted.cell("sdpa", run))


def passes_without_an_output(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Compares the outputs that both have."""
    return all(torch.allclose(got[name], want[name]) for name in got.keys() & want.keys())


def test_a_missing_output_is_no_right_answer():
    want = RIGHT(CASE, CASE.inputs())
    assert passes_without_an_output({"out": want["out"]}, want)
    assert passes_without_an_output({}, want)
    record = put(lambda case, t: {"out": RIGHT(case, t)["out"]})
    assert record.status is Status.DISAGREE
    assert "output lse is missing" in record.why


def test_a_window_that_clips_no_key_is_no_question():
    """Their window test: as many keys as the window, so that no window at all passes too."""
    case = replace(CASE, window=8, lse=False)
    inputs = case.inputs()
    plain = replace(case, window=None)
    assert torch.equal(case.expected(inputs)["out"], plain.expected(plain.inputs())["out"])
    ignores = put(lambda case, t: RIGHT(plain, t), case)
    assert ignores.status is Status.VACUOUS
    found = gate.findings([ignores] * 30)
    assert any("judged 0 cases" in sentence for sentence in found)


def subjects() -> Iterator[tuple[str, Any, str]]:
    """What a breaker hands in, and what is said of it."""
    yield "its-input", lambda case, t: {**RIGHT(case, t), "out": t["q"]}, "x what is allowed"
    yield "zeros", lambda case, t: {n: x * 0 for n, x in RIGHT(case, t).items()}, "is 0.0, expected"
    yield "nan", lambda case, t: {n: x * NAN for n, x in RIGHT(case, t).items()}, "is nan, expected"
    yield (
        "a-view-of-its-input",
        lambda case, t: {
            **RIGHT(case, t),
            "out": t["v"][:, :, :2].expand(1, 2, 2, 8),
        },
        "x what is allowed",
    )
    yield (
        "a-dtype-that-compares-equal",
        lambda case, t: {n: x.double() for n, x in RIGHT(case, t).items()},
        "has dtype float64, expected float32",
    )
    yield "one-of-two", lambda case, t: {"out": RIGHT(case, t)["out"]}, "output lse is missing"
    yield (
        "a-generator",
        lambda case, t: (pair for pair in RIGHT(case, t).items()),
        "the subject returned generator, expected a dict",
    )
    yield (
        "a-list-for-a-tensor",
        lambda case, t: {n: x.tolist() for n, x in RIGHT(case, t).items()},
        "expected a torch.Tensor, got list",
    )

    def changes(case: Any, t: Any) -> Any:
        answer = RIGHT(case, t)
        t["q"].mul_(2)
        return answer

    yield "changes-its-inputs", changes, "the subject changed its input q"

    def spills(case: Any, t: Any) -> Any:
        answer, kept = RIGHT(case, t), t["k"].clone()
        torch.empty(0).set_(t["k"].untyped_storage()).fill_(7.0)
        t["k"].copy_(kept)
        return answer

    yield "writes-beside-its-inputs", spills, "the subject changed its input k"


@pytest.mark.parametrize(
    ("run", "said"), [pytest.param(run, said, id=name) for name, run, said in subjects()]
)
def test_a_subject_of_the_breaker_is_rejected(run, said):
    record = put(run, replace(CASE, layout="sliced"))
    assert record.status is Status.DISAGREE
    assert said in record.why


def lazily_negated(x: Tensor) -> Tensor:
    view = torch.complex(torch.zeros_like(x), x).conj().imag
    assert view.is_neg()
    return view


def test_a_lazily_negated_view_is_an_answer():
    record = put(lambda case, t: {n: lazily_negated(-x) for n, x in RIGHT(case, t).items()})
    assert record.status is Status.AGREE
    again = replace(CASE, seed=8)
    record = put(lambda case, t: {n: lazily_negated(x) for n, x in RIGHT(case, t).items()}, again)
    assert record.status is Status.DISAGREE


def test_a_tensor_on_another_device_is_rejected():
    record = put(lambda case, t: {n: x.to("meta") for n, x in RIGHT(case, t).items()})
    assert record.status in (Status.DISAGREE, Status.ERROR)


def passes_unless_it_fails(run: Any) -> bool:
    """pytest's own notion: what raises no Exception has not failed."""
    try:
        run(CASE, CASE.inputs())
    except Exception:
        return False
    except BaseException:
        return True
    return True


ESCAPES = (
    pytest.skip.Exception("not today"),
    pytest.xfail.Exception("known"),
    SystemExit(0),
    GeneratorExit(),
    asyncio.CancelledError(),
)


@pytest.mark.parametrize("error", ESCAPES, ids=lambda error: type(error).__name__)
def test_what_is_no_exception_ends_nothing(error):
    def run(case: Any, t: Any) -> Any:
        raise error

    assert passes_unless_it_fails(run)
    record = put(run)
    assert record.status is Status.ERROR
    assert f"the subject raised {type(error).__name__}" in record.why

    class Lazy(dict):
        def items(self) -> Any:
            raise error

    assert f"the subject raised {type(error).__name__}" in put(lambda case, t: Lazy()).why


def test_ctrl_c_is_not_the_subject_s():
    def run(case: Any, t: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put(run)


SHORT: Profile = replace(PROFILES["premerge"], examples=30)


def found(run: Any) -> Record | None:
    cell = planted.cell("sdpa", run, claims=frozenset({"causal"}), dtypes=("float32",))
    return search(cell, SHORT, 0, lambda record: None)


def test_an_answer_that_depends_on_the_call_before_is_rejected():
    calls: list[int] = []

    def run(case: Any, t: Any) -> Any:
        calls.append(1)
        answer = RIGHT(case, t)
        return {**answer, "out": answer["out"] * (1 + 2.0**-20 * (len(calls) % 2))}

    record = found(run)
    assert record is not None
    assert record.status in (Status.DISAGREE, Status.ERROR)


def test_what_is_kept_by_address_is_rejected():
    """A packed weight, say, that is not packed again when the weight was written into."""
    packed: dict[Any, Any] = {}

    def run(case: Any, t: Any) -> Any:
        k = t["k"]
        kept = packed.setdefault((k.data_ptr(), k.shape), k.clone())
        return RIGHT(case, {**t, "k": kept})

    record = put(run, replace(CASE, seed=16))
    assert record.status is Status.DISAGREE
    assert found(run) is not None


def too_wide(case: Any, inputs: Any, mode: Any) -> Any:
    """A declaration that allows every finite answer."""
    envelope = programs.envelope("sdpa")(case, inputs, mode)
    return {n: MidRad(x.mid, torch.full_like(x.mid, 1e300)) for n, x in envelope.items()}


def test_a_declaration_never_allows_what_no_arithmetic_does():
    def zeros(case: Any, t: Any) -> Any:
        return {n: x * 0 for n, x in RIGHT(case, t).items()}

    cell = planted.cell("sdpa", zeros, too_wide)
    record = judge(replace(CASE, seed=16), cell)
    assert record.status is Status.DISAGREE
    assert "allows what no arithmetic of float32 does" in record.why
    claims = frozenset({"causal"})
    cell = planted.cell("sdpa", zeros, too_wide, claims=claims, dtypes=("float32",))
    assert search(cell, SHORT, 0, lambda record: None) is not None


def test_a_case_of_which_the_dtypes_bound_nothing_is_no_evidence(monkeypatch):
    envelope = programs.envelope("sdpa")

    def overflows(case: Any, inputs: Any, mode: Any) -> Any:
        return {
            n: MidRad(x.mid, torch.full_like(x.mid, INF))
            for n, x in envelope(case, inputs, mode).items()
        }

    monkeypatch.setattr("harness.programs.sdpa.envelope", overflows)
    record = put(RIGHT)
    assert record.status is Status.VACUOUS
    assert "bound no element" in record.why


def test_an_answer_for_seed_0_only_is_rejected():
    def run(case: Any, t: Any) -> Any:
        answer = RIGHT(case, t)
        return answer if case.seed == 0 else {**answer, "out": answer["out"] + 1}

    assert found(run) is not None


def test_right_but_for_the_last_element_of_the_largest_case_is_rejected():
    largest = 0

    def run(case: Any, t: Any) -> Any:
        nonlocal largest
        answer = RIGHT(case, t)
        if case.work > largest:
            largest = case.work
            answer["out"].view(-1)[-1] += 0.5
        return answer

    record = found(run)
    assert record is not None


def thieves() -> Iterator[tuple[str, Any]]:
    """Subjects that take the reference from the harness instead of computing."""
    yield (
        "from-its-case",
        lambda case, t: {n: x.float() for n, x in case.expected(case.inputs()).items()},
    )

    def from_the_stack(case: Any, t: Any) -> Any:
        frame = inspect.currentframe()
        while frame is not None and "inputs" not in frame.f_locals:
            frame = frame.f_back
        inputs = t if frame is None else frame.f_locals["inputs"]
        return {n: x.float() for n, x in case.expected(inputs).items()}

    yield "from-the-stack", from_the_stack


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in thieves()])
def test_a_subject_in_our_process_can_return_the_reference_and_is_then_the_reference(run):
    """Reasoned, not rejected: python hides nothing from code that it runs.

    What it hands in is the right answer, so no judgement of answers can tell. Two other checks can:
    a production kernel has to show in the trace (the path proof), and it computes in its own
    arithmetic: the reference, rounded once, is not what a kernel that rounds on the way gives.
    """
    assert put(run).status is Status.AGREE
    proven = planted.cell("sdpa", run, kernels=("aten::_scaled_dot_product_flash_attention",))
    record = judge(replace(CASE, seed=8), proven)
    assert record.status is Status.ERROR
    assert "did not run; ran: " in record.why


# What is counted ---------------------------------------------------------------------------------


def passes_with_zero_cases(results: list[bool]) -> bool:
    """All of no results are good; `n_ok == tests_run` holds at 0."""
    return all(results)


def test_zero_cases_do_not_pass():
    assert passes_with_zero_cases([])
    assert gate.findings([]) != []
    cell = ("sdpa", "torch.sdpa.math", "cpu")
    assert gate.findings([], cells=[cell], required=["cpu"]) != []
    (said,) = gate.findings([put(RIGHT)], cells=[cell])
    assert "no record: the cell was to be asked and was not" in said


def passes_without_its_file(folder: Any) -> bool:
    """Reads the failures that a step before it should have written, and there is no such step."""
    report = folder / "failures.txt"
    return not (report.exists() and report.read_text())


def test_a_gate_that_reads_what_nobody_wrote_does_not_pass(tmp_path):
    assert passes_without_its_file(tmp_path)
    with pytest.raises(RunError):
        read_run(tmp_path)
    with pytest.raises(RunError):
        latest(tmp_path)
    open_run(tmp_path, {"profile": "premerge", "seed": 0}).close()
    (folder,) = tmp_path.iterdir()
    _, records = read_run(folder)
    assert gate.findings(list(records), required=["cpu"]) != []
