"""Proof that the harness can fail: each planted defect is caught, and a perfect subject passes."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import cases
from cases import defects
from cases.case import Case
from cases.sdpa import SdpaCase
from harness import engines, faults, profiles, programs
from harness.arithmetic.mode import DET
from harness.compare import compare
from harness.subject import Program, Subject
from tests import planted

BUDGET = profiles.load("premerge").examples
PERFECT = 10_000
"""Cases that perfect subjects are put to, over all declared programs of all ops."""


@functools.cache
def drawn(op: str, claims: frozenset[str], dtype: str, count: int) -> tuple[Case, ...]:
    """The first cases that the pre-merge generator draws."""
    found = []

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(case=cases.load(op).strategy(claims, (dtype,)))
    def draw(case):
        found.append(case)

    draw()
    return tuple(found)


def declared() -> list[tuple[str, Subject, Program]]:
    """(op, subject, program) of every subject whose arithmetic is declared."""
    return [
        (op, subject, subject.programs["cpu"])
        for engine in engines.NAMES
        if engines.absent(engine) is None
        for op in engines.ops(engine)
        for subject in engines.subjects(engine, op)
        if "cpu" in subject.programs
    ]


DECLARED = declared()
TRIALS = [
    pytest.param(op, subject, program, dtype, id=f"{subject.name}-{dtype}")
    for op, subject, program in DECLARED
    for dtype in subject.dtypes
    if defects.load(op) and (op == "sdpa" or subject.engine == "native")
]
"""Every attention subject, and for the other ops our own, whose arithmetic the others vary."""


@pytest.mark.parametrize(("op", "subject", "program", "dtype"), TRIALS)
def test_every_defect_is_caught_within_the_premerge_budget(op, subject, program, dtype):
    """The same kernel, answering the faulty question, is told from the right one."""
    alive = {defect.name: defect for defect in defects.load(op)}
    shown = set()
    for case in drawn(op, subject.claims, dtype, BUDGET):
        if not alive:
            break
        inputs = case.inputs()
        if subject.refuses(case) or case.vacuous(inputs):
            continue
        allowed = program(case, inputs, planted.mode(case))
        right = planted.rounded(case, allowed)
        for name, defect in list(alive.items()):
            wrong = planted.faulty(program, defect, case, inputs)
            if wrong is None or all(torch.equal(wrong[key], right[key]) for key in right):
                continue  # the fault can't show here, or rounds to the same bits
            shown.add(name)
            if not compare(wrong, allowed, case.judged(inputs)).allowed:
                del alive[name]
    missed = sorted(shown & set(alive))
    assert not missed, f"{subject.name} in {dtype}: not caught in {BUDGET} cases: {missed}"


@pytest.mark.parametrize("op", defects.OPS)
def test_every_defect_shows_in_some_drawn_case(op):
    """No defect is caught by never being asked: each changes the answer to some drawn case."""
    module = cases.load(op)
    hidden = {defect.name: defect for defect in defects.load(op)}
    features = frozenset(module.FEATURES)
    for case in (case for dtype in module.DTYPES for case in drawn(op, features, dtype, BUDGET)):
        if not hidden:
            break
        inputs = case.inputs()
        right = case.expected(inputs)
        for name, defect in list(hidden.items()):
            wrong = defect.answer(case, inputs)
            if wrong is not None and any(
                not torch.equal(x.double(), right[key].double()) for key, x in wrong.items()
            ):
                del hidden[name]
    assert not hidden


DISTINCT = {
    id(program): (op, subject, program)
    for op, subject, program in DECLARED
    if op == "sdpa" or subject.engine == "native"
}


@pytest.mark.parametrize(
    ("op", "subject", "program"),
    [pytest.param(*entry, id=entry[1].name) for entry in DISTINCT.values()],
)
def test_a_perfect_subject_passes(op, subject, program):
    each = -(-PERFECT // (len(DISTINCT) * len(subject.dtypes)))
    for dtype in subject.dtypes:
        for case in drawn(op, subject.claims, dtype, each):
            inputs = case.inputs()
            if subject.refuses(case):
                continue
            allowed = program(case, inputs, planted.mode(case))
            verdict = compare(planted.rounded(case, allowed), allowed, case.judged(inputs))
            assert verdict.excess == 0, f"{case.to_json()}: {verdict.why}"


LONG = SdpaCase(
    dtype="bfloat16", seed=1, values="normal", batch=1, q_len=16, kv_len=300, heads=4, kv_heads=2,
    head_dim=64, causal=True, window=256,
)  # fmt: skip
AT_LENGTH_300 = (
    "window-plus-one",
    "window-minus-one",
    "last-key-missing",
    "sink-dropped",
    "heads-tiled",
    "scale-plus-0.1%",
)


@pytest.mark.parametrize(
    ("subject", "program", "dtype"),
    [
        pytest.param(subject, program, dtype, id=f"{subject.name}-{dtype}")
        for op, subject, program in DECLARED
        if op == "sdpa" and "window" in subject.claims
        for dtype in subject.dtypes
    ],
)
def test_small_faults_are_caught_at_length_300(subject, program, dtype):
    """By some of a few cases: a sink of logit -4 among 256 keys weighs a ten-thousandth."""
    alive, shown = set(AT_LENGTH_300), set()
    for seed_ in range(1, 9):
        case = replace(LONG, dtype=dtype, seed=seed_)
        if "sinks" in subject.claims:
            case = replace(case, sinks=-4.0 if seed_ % 2 else 0.0)
        if subject.refuses(case):  # a decode kernel
            case = replace(case, q_len=1, batch=4, heads=16)
        assert subject.refuses(case) is None
        inputs = case.inputs()
        allowed = program(case, inputs, planted.mode(case))
        right = planted.rounded(case, allowed)
        for defect in defects.load("sdpa"):
            if defect.name not in alive:
                continue
            wrong = planted.faulty(program, defect, case, inputs)
            if wrong is None or torch.equal(wrong["out"], right["out"]):
                continue
            shown.add(defect.name)
            if not compare(wrong, allowed, {}).allowed:
                alive.remove(defect.name)
        if not alive:
            break
    assert not shown & alive
    assert {"window-plus-one", "window-minus-one", "last-key-missing"} <= shown


@pytest.mark.parametrize("name", [d.name for d in defects.load("sdpa")])
def test_the_matched_filter_names_the_planted_fault(name):
    """By the envelope alone, on the reference's own answer in float32."""
    dictionary = defects.load("sdpa")
    [defect] = [d for d in dictionary if d.name == name]
    case = replace(
        LONG,
        dtype="float32",
        q_len=8,
        sinks=0.0,
        softcap=20.0,
        scale=0.3,
        kv_len=40,
        window=24,
        batch=2,
    )
    if name == "padding-visible":
        case = replace(case, kv_lens=(40, 31))
    if name in ("window-ignored-in-decode",):
        case = replace(case, schedule=(5, 1, 1, 1))
    if name in ("causal-ignored", "first-key-missing"):  # else the same keys as another fault's
        case = replace(case, window=None)
    inputs = case.inputs()
    wrong = defect.answer(case, inputs)
    assert wrong is not None
    observed = {key: x.to(torch.float32) for key, x in wrong.items()}
    fault = faults.name(
        case, inputs, observed, programs.envelope("sdpa")(case, inputs, DET), dictionary
    )
    assert fault is not None
    assert fault.defect.name == name
    assert 0.8 < fault.alpha < 1.2


def test_no_fault_is_named_in_a_right_answer():
    dictionary = defects.load("sdpa")
    for case in drawn("sdpa", frozenset({"causal", "window", "sinks"}), "bfloat16", 40):
        inputs = case.inputs()
        observed = {k: x.to(torch.bfloat16) for k, x in case.expected(inputs).items()}
        envelope = programs.envelope("sdpa")(case, inputs, DET)
        assert faults.name(case, inputs, observed, envelope, dictionary) is None
