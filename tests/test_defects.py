"""Proof that the harness can fail: each planted defect is caught, and a perfect subject passes."""

import functools
import re
from dataclasses import replace

import pytest
import torch

import cases
from cases import defects
from cases.defects import Defect
from cases.sdpa import SdpaCase
from harness import engines, faults, profiles, programs
from harness.arithmetic.mode import DET
from harness.compare import compare
from harness.power import planted, questions
from harness.power.measure import measure
from harness.power.questions import Question
from harness.power.trial import Trial
from harness.subject import Program, Subject

BUDGET = profiles.load("premerge").examples
PERFECT = 10_000
"""Cases that perfect subjects are put to, over all declared programs of all ops."""

drawn = functools.cache(questions.drawn)


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


def attention(*needed: str) -> list[pytest.ParameterSet]:
    """(subject, program, dtype) of all declared attention that claims what is needed."""
    return [
        pytest.param(subject, program, dtype, id=f"{subject.name}-{dtype}")
        for op, subject, program in DECLARED
        if op == "sdpa" and subject.claims.issuperset(needed)
        for dtype in subject.dtypes
    ]


ANY_SUBJECT = (
    "window-plus-one",
    "window-minus-one",
    "window-ignored-in-decode",
    "last-key-missing",
    "upper-left",
    "sink-dropped",
    "softcap-ignored",
    "heads-tiled",
    "scale-plus-0.1%",
    "alibi-ignored",
    "alibi-of-the-next-head",
    "alibi-off-by-one",
)
"""What must be caught in attention of any declared arithmetic, within the dtypes or not."""


@pytest.mark.parametrize(("subject", "program", "dtype"), attention())
def test_declared_attention_catches_small_faults_within_the_premerge_budget(
    subject, program, dtype
):
    """The same kernel, answering the faulty question, is told from the right one."""
    chosen = [fault for fault in defects.planted("sdpa") if fault.name in ANY_SUBJECT]
    assert len(chosen) == len(ANY_SUBJECT)
    trial = Trial(
        "sdpa", dtype, program=program, faults=chosen, named=False, rules=False, again=False
    )
    for case in drawn("sdpa", dtype, BUDGET, subject.claims):
        if subject.refuses(case) is None:
            trial.put(Question(case=case))
        if all(tally.caught for tally in trial.tallies):
            break
    missed = [tally.defect for tally in trial.tallies if not (tally.caught or tally.equivalent)]
    assert not missed, f"{subject.name} in {dtype}: not caught in {BUDGET} cases: {missed}"


BELOW = {
    "sdpa": {"scale-plus-0.1%"},
    "bmm": {"scale-plus-0.1%"},
}
"""Defects that two roundings of a 16-bit dtype may hide: a constant rounded there is off by more.
Only a kernel that declares its arithmetic is told (above)."""

SHORT = ("bfloat16", "float16")


@pytest.mark.parametrize(
    ("op", "dtype"), [(op, dtype) for op in defects.OPS for dtype in cases.load(op).DTYPES]
)
def test_every_defect_is_caught_within_the_premerge_budget(op, dtype):
    """As a person's own kernel is judged, and by drawn cases alone."""
    tallies = measure(
        op, dtype, BUDGET, pinned=False, old=False, named=False, rules=False, again=False
    )
    missed = {tally.defect for tally in tallies if not (tally.caught or tally.equivalent)}
    assert missed <= (BELOW.get(op, set()) if dtype in SHORT else set())


@pytest.mark.parametrize("op", defects.OPS)
def test_every_defect_shows_in_some_drawn_case(op):
    """No defect is caught by never being asked: each changes the answer to some drawn case."""
    module = cases.load(op)
    hidden = {fault.name: fault for fault in defects.planted(op) if isinstance(fault, Defect)}
    asked = (
        case
        for dtype in module.DTYPES
        for claims in questions.kinds(op)
        for case in drawn(op, dtype, BUDGET, claims)
    )
    for case in asked:
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


def test_every_real_bug_is_planted_or_says_why_not():
    known = defects.bugs()
    planted_ = {bug for op in defects.OPS for fault in defects.planted(op) for bug in fault.bugs}
    excused = {bug for bug, entry in known.items() if "unplanted" in entry}
    assert len(known) == 127
    assert planted_ | excused == set(known)
    assert not planted_ & excused
    for bug, entry in known.items():
        assert re.fullmatch(r"B\d{3}", bug)
        assert entry["ref"]
        assert entry.get("unplanted", "because").strip()


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
        for case in drawn(op, dtype, each, subject.claims):
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


@pytest.mark.parametrize(("subject", "program", "dtype"), attention("window"))
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


SHORT_KEYS = replace(
    LONG, dtype="float32", q_len=8, sinks=0.0, softcap=20.0, scale=0.3, kv_len=40, window=24,
    batch=2,
)  # fmt: skip
RAGGED = {"kv_lens": (40, 31)}
SHOWN_BY = {
    "padding-visible": RAGGED,
    "window-padded-by-full-lengths": RAGGED,
    "mask-replaced": RAGGED,
    "mask-read-ragged": RAGGED,
    "mask-over-heads": RAGGED,
    "query-masked-by-oldest-key": RAGGED | {"side": "left", "q_len": 1},
    "mask-added": {"softcap": None},
    "window-ignored-in-decode": {"schedule": (5, 1, 1, 1)},
    "causal-ignored": {"window": None},  # else the same keys as another fault's
    "first-key-missing": {"window": None},
    "tail-of-one-dropped": {"kv_len": 33, "q_len": 1, "kv_lens": (33, 20)},
    "dead-rows-average": {"kv_len": 5, "window": None, "sinks": None, "softcap": None},
    "first-request-for-all": {"kv_heads": 1},
    "sink-of-the-first-head": {"kv_heads": 1},
    "heads-regrouped": {"heads": 6},
    "heads-left-out": {"heads": 6},
    "lse-transposed": {"lse": True},
    **{
        d.name: {"alibi": 8.0, "window": None}
        for d in defects.load("sdpa")
        if d.name.startswith("alibi")
    },
    "alibi-ignored-in-decode": {"alibi": 8.0, "schedule": (5, 1, 1, 1)},
    "alibi-of-the-first-head": {"alibi": 8.0, "kv_heads": 1},
    "alibi-of-the-first-rank": {"alibi": 8.0, "heads": 8},
    "alibi-without-powers": {"alibi": 8.0, "heads": 6},
    "alibi-symmetric": {"alibi": 8.0, "causal": False, "window": None},
}
"""What a case needs besides, for this fault to be told from the others."""


@pytest.mark.parametrize("name", [d.name for d in defects.load("sdpa") if not d.rounding])
def test_the_matched_filter_names_the_planted_fault(name):
    """By the envelope alone, on the reference's own answer in float32."""
    dictionary = defects.load("sdpa")
    [defect] = [d for d in dictionary if d.name == name]
    case = replace(SHORT_KEYS, **SHOWN_BY.get(name, {}))
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
    for case in drawn("sdpa", "bfloat16", 40, frozenset({"causal", "window", "sinks"})):
        inputs = case.inputs()
        observed = {k: x.to(torch.bfloat16) for k, x in case.expected(inputs).items()}
        envelope = programs.envelope("sdpa")(case, inputs, DET)
        assert faults.name(case, inputs, observed, envelope, dictionary) is None
