"""Power on trial: what is counted is what the ordinary path says, and a miss is shown as one."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cases
from cases import defects
from cases.bmm import BmmCase
from cases.case import Inputs
from cases.defects import Defect, Lasting, Misread
from cases.sdpa import SdpaCase
from harness import programs
from harness.power import correct, plain, planted, questions
from harness.power.measure import DECLARED, declared, measure
from harness.power.questions import Question
from harness.power.rules import RULES, Answers
from harness.power.statistics import interval, miss
from harness.power.trial import Trial
from harness.record import Record, Status
from harness.run import ask
from harness.rundir import open_run
from reports import power as report
from reports.power import Measured
from tests.test_cli import Parity, parity

__all__ = ["parity"]  # a fixture

CASE = SdpaCase(
    dtype="float32", seed=1, values="normal", batch=1, q_len=4, kv_len=20, heads=2, kv_heads=1,
    head_dim=16, causal=True, window=8,
)  # fmt: skip


def same(case: Any, inputs: Inputs) -> Any:
    return case, inputs


def slightly(case: Any, out: Inputs) -> Inputs:
    return {name: x * (1 + 2.0**-22) for name, x in out.items()}


EQUIVALENT = Defect(name="nothing", bugs=(), sentence="nothing is wrong", question=same)
UNSEEN = Defect(
    name="slight", bugs=(), sentence="last bit wrong", question=same, answer_of=slightly
)
PLAIN = Defect(
    name="negative", bugs=(), sentence="negative", question=same,
    answer_of=lambda case, out: {name: -x for name, x in out.items()},
)  # fmt: skip


# Statistics ----------------------------------------------------------------------------------


def test_interval_of_no_hit_and_of_hits_alone() -> None:
    assert interval(0, 60) == pytest.approx((0, 1 - 0.025 ** (1 / 60)), abs=1e-12)
    assert interval(60, 60) == pytest.approx((0.025 ** (1 / 60), 1), abs=1e-12)


def test_interval_has_published_ends() -> None:
    """Clopper & Pearson's chart, as R's binom.test gives it to four digits."""
    assert interval(4, 10) == pytest.approx((0.1216, 0.7376), abs=5e-5)
    assert interval(1, 20) == pytest.approx((0.0013, 0.2487), abs=5e-5)


def test_interval_covers_as_often_as_it_says() -> None:
    """The exact coverage of 95 % intervals of 30 trials, over a grid of probabilities."""
    ends = [interval(hits, 30) for hits in range(31)]
    for p in (0.01, 0.1, 0.25, 0.5, 0.9):
        chance = [math.comb(30, k) * p**k * (1 - p) ** (30 - k) for k in range(31)]
        covered = sum(c for c, (low, high) in zip(chance, ends, strict=True) if low <= p <= high)
        assert covered >= 0.95


@pytest.mark.parametrize(("hits", "trials"), [(-1, 3), (4, 3), (0, 0)])
def test_impossible_counts_are_refused(hits: int, trials: int) -> None:
    with pytest.raises(ValueError, match=f"hits={hits}"):
        interval(hits, trials)


def test_miss_is_the_chance_of_no_kill() -> None:
    assert miss(0.5, 10) == pytest.approx(2**-10)
    assert miss(0.01, 1500) == pytest.approx(0.99**1500)
    assert (miss(0, 1500), miss(1, 1)) == (1, 0)


# Trial ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [None, declared("sdpa")], ids=["envelope", "declared"])
def test_a_verdict_is_that_of_the_ordinary_path(program: Any) -> None:
    """Sharing what is known of a case changes no record."""
    kept: list[Record] = []
    trial = Trial("sdpa", "float32", program=program, rules=False, keep=kept.append)
    trial.put(Question(case=CASE))
    assert len(kept) > 10
    for record in kept:
        name = record.subject.split(".", 2)[2]
        [fault] = [f for f in defects.planted("sdpa") if f.name == name]
        if isinstance(fault, Lasting):
            continue
        assert isinstance(fault, Defect)
        wrong = trial.answer(fault, CASE, CASE.inputs())
        alone = ask(CASE, planted.cell("sdpa", lambda case, tensors, wrong=wrong: wrong, program))
        fields = ("status", "fault", "excess", "where", "why", "program")
        assert [getattr(alone, f) for f in fields] == [getattr(record, f) for f in fields]


def test_right_answers_are_counted_apart() -> None:
    [nothing, slight, negative] = measure(
        "sdpa", "float32", 3, faults=(EQUIVALENT, UNSEEN, PLAIN), pinned=False, old=False
    )
    assert nothing.equivalent
    assert not nothing.caught
    assert not slight.equivalent
    assert (slight.shown, slight.killed, slight.first) == (3, 0, None)
    assert (negative.killed, negative.first, negative.drawn) == (3, 1, 3)
    assert negative.rules["assert_close"] > 0


def test_a_given_case_is_no_draw() -> None:
    trial = Trial("sdpa", "float32", faults=(PLAIN,))
    trial.put(Question(case=CASE, drawn=False))
    [tally] = trial.tallies
    assert (tally.drawn, tally.killed, tally.first) == (0, 0, None)
    assert (tally.given_killed, tally.caught) == (1, True)


def test_what_was_caught_is_asked_on_only_if_wanted() -> None:
    trial = Trial("sdpa", "float32", faults=(PLAIN,), again=False)
    for seed in (1, 2):
        trial.put(Question(case=replace(CASE, seed=seed)))
    [tally] = trial.tallies
    assert (tally.drawn, tally.killed) == (2, 1)


def test_a_vacuous_case_catches_nothing() -> None:
    trial = Trial("sdpa", "float32", faults=(PLAIN,))
    trial.put(Question(case=replace(CASE, window=64)))
    assert trial.tallies[0].equivalent
    assert trial.tallies[0].drawn == 1


def test_a_lasting_fault_depends_on_the_call_before() -> None:
    """The first window of all is right for its own call alone."""
    [fault] = [f for f in defects.planted("sdpa") if f.name == "window-of-the-first-call"]
    trial = Trial("sdpa", "float32", faults=(fault,))
    trial.put(Question(case=CASE))
    assert trial.tallies[0].equivalent
    trial.put(Question(case=replace(CASE, window=4)))
    assert (trial.tallies[0].shown, trial.tallies[0].killed) == (1, 1)


def test_a_fault_that_changes_its_input_is_told_by_the_contract() -> None:
    [fault] = [f for f in defects.planted("yarn") if f.name == "input-scaled-in-place"]
    case = replace(dict(cases.load("yarn").PINNED)["gpt-oss-20b"], dtype="float32")
    kept: list[Record] = []
    Trial("yarn", "float32", faults=(fault,), keep=kept.append).put(Question(case=case))
    assert [record.status for record in kept] == [Status.DISAGREE]
    assert kept[0].why == "the subject changed its input q"


def test_a_misread_config_goes_through_the_translator() -> None:
    [fault] = [f for f in defects.planted("yarn") if f.name == "attention-factor-unknown"]
    assert isinstance(fault, Misread)
    case = next(case for _, case in cases.load("yarn").PINNED if case.sets_attention_factor)
    trial = Trial("yarn", case.dtype, faults=(fault,))
    trial.put(Question(case=case))
    assert trial.tallies[0].killed == 1


def test_bmm_defects_of_codes_are_put_to_a_kernel_that_takes_them() -> None:
    [fault] = [f for f in defects.planted("bmm") if f.name == "blocks-of-scales"]
    [tally] = measure("bmm", "bfloat16", 20, faults=(fault,), pinned=False, rules=False)
    assert tally.killed > 0


@pytest.mark.parametrize("op", DECLARED)
def test_declared_arithmetic_is_of_a_subject_that_claims_everything(op: str) -> None:
    [cell] = [c for c in correct.kernels(op) if c.subject.name == DECLARED[op]]
    assert questions.kinds(op)[0] <= cell.subject.claims


# Rules of others -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype"), [(op, dtype) for op in cases.OPS for dtype in cases.load(op).DTYPES]
)
def test_a_plain_run_is_right(op: str, dtype: str) -> None:
    claims = questions.kinds(op)[0]
    cell = planted.cell(op, plain.OPS[op], claims=claims)
    for case in questions.drawn(op, dtype, 12, claims):
        record = ask(case, cell)
        assert record.status in (Status.AGREE, Status.VACUOUS), f"{case.to_json()}: {record.why}"


def judged(rule: str, observed: list[float], right: list[float], plain_: list[float]) -> bool:
    answers = Answers(
        right={"out": torch.tensor(right)}, plain={"out": torch.tensor(plain_)}, judged={}
    )
    return answers.passes(RULES[rule], {"out": torch.tensor(observed)})


def test_each_rule_takes_a_right_answer_and_rejects_another_one() -> None:
    right = [1.0, -2.0, 3.0]
    for rule in RULES:
        assert judged(rule, right, right, right)
        assert not judged(rule, [-1.0, 2.0, -3.0], right, right)
        assert not judged(rule, [1.0, math.nan, 3.0], right, right)


def test_rules_have_the_holes_that_they_are_known_for() -> None:
    many = [1.0] * 10_000
    assert judged("cosine", [2.0] * 10_000, many, many)  # a scale
    assert judged("cosine", [5.0, *many[1:]], many, many)  # one element
    assert judged("NMSE", [3.0, *many[1:]], many, many)
    assert judged("assert_close", [-1e-30], [1e-30], [1e-30])  # small numbers, of any sign
    assert judged("1.5e-1", [1.29, *many[1:]], many, many)
    assert judged("2x plain", [1.19, *many[1:]], many, [*many[1:], 0.9])


def test_elements_without_a_meaning_are_left_out() -> None:
    answers = Answers(
        right={"out": torch.zeros(2)},
        plain={"out": torch.zeros(2)},
        judged={"out": torch.tensor([True, False])},
    )
    observed = {"out": torch.tensor([0.0, math.nan])}
    assert all(answers.passes(rule, observed) for rule in RULES.values())


def test_our_rule_takes_right_kernels() -> None:
    for cell in correct.kernels("bmm")[:3]:
        tally = correct.right(cell, "bfloat16", 10)
        assert tally.judged > 0
        assert tally.rejected == 0


def test_a_kernel_that_is_not_right_is_counted() -> None:
    def negative(case: Any, tensors: Any) -> Any:
        return {name: -x for name, x in plain.bmm(case, tensors).items()}

    cell = planted.cell("bmm", negative, claims=questions.kinds("bmm")[0])
    tally = correct.right(cell, "float32", 5)
    assert tally.judged == tally.rejected == tally.rules["assert_close"] > 0


# Report --------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, *faults: Defect) -> None:
    monkeypatch.setattr(defects, "planted", lambda op: faults)


WORDS = ("power", "--op", "sdpa", "--dtype", "float32", "--budget", "4", "--no-right")


def test_a_defect_that_is_never_caught_is_a_finding(
    parity: Parity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, PLAIN, UNSEEN)
    code, out, _ = parity(*WORDS, "--runs", str(tmp_path))
    assert code == 1
    assert "finding: sdpa slight: never caught in 4 cases: float32 (4 answers differ)" in out
    assert "finding: sdpa negative" not in out


def test_what_was_measured_is_kept_and_shown_again(
    parity: Parity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, PLAIN, EQUIVALENT)
    code, out, _ = parity(*WORDS, "--runs", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    info = json.loads((folder / "run.json").read_text())
    assert [t["defect"] for t in info["power"]["tallies"]] == ["negative", "nothing"]
    assert len((folder / "records.jsonl").read_text().splitlines()) >= 4
    assert out.splitlines()[-1] == str(folder)
    assert "finding: " not in out
    assert code == 0
    assert parity("power", "--again", str(folder))[1] == out
    code, out, _ = parity("power", "--again", str(folder), "--markdown")
    assert "| sdpa | 2 | 1 | 1 | 1 (100.0%) |" in out
    assert str(folder) not in out


def test_bad_values_are_one_sentence(parity: Parity, tmp_path: Path) -> None:
    other = open_run(tmp_path).finish({})
    for words, value in (
        (("--op", "spda"), "op='spda'"),
        (("--dtype", "int3"), "dtype='int3'"),
        (("--budget", "0"), "--budget 0"),
        (("--held-to", "mercy"), "--held-to 'mercy'"),
        (("--again", str(other)), "no finished measurement"),
        (("--again", str(tmp_path / "none")), "is no run"),
    ):
        code, out, err = parity("power", *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert value in err


def test_too_few_pairs_names_or_a_failed_right_kernel_is_a_finding() -> None:
    tallies = measure("sdpa", "float32", 3, faults=(PLAIN,), pinned=False, old=False)
    good = Measured(budget=3, held_to="envelope", tallies=tuple(tallies))
    unnamed = replace(tallies[0], named=0, right=0)
    wrong = correct.Right(op="sdpa", kernel="x.sdpa.y", dtype="float32", judged=4, rejected=1)
    assert any("are named as" in s for s in report.findings(replace(good, tallies=(unnamed,))))
    assert report.findings(replace(good, rights=(wrong,)))[-1] == (
        "x.sdpa.y in float32 is right, and 1 of 4 cases failed it"
    )
    rare = replace(tallies[0], drawn=180, shown=2, killed=2, named=2, right=2)
    assert not report.findings(replace(good, tallies=(rare,)))
    (said,) = report.findings(replace(good, budget=60, tallies=(rare,)))
    assert "a nightly run may miss it with a chance of " in said


def test_the_envelope_of_no_op_is_asked_for_declared_arithmetic() -> None:
    assert [op for op in cases.OPS if declared(op) is None] == [
        op for op in cases.OPS if programs.load(op).EXACT
    ]


def test_bmm_kernels_of_two_kinds_cover_all_features() -> None:
    assert frozenset().union(*questions.kinds("bmm")) == frozenset(cases.load("bmm").FEATURES)
    assert all(BmmCase.from_json(c.to_json()) == c for c in questions.drawn(
        "bmm", "bfloat16", 3, questions.kinds("bmm")[1]))  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_right_kernel_that_shows_its_stages_is_right_in_each(dtype: str):
    [cell] = [c for c in correct.kernels("mla") if c.subject.name == "reference.mla.rounded"]
    asked = [q for q in questions.asked("mla", dtype, 20, old=False) if q.drawn]
    staged = [question.case for question in asked if "stages" in question.case.features()]
    assert len(staged) > 3
    for case in staged:
        assert ask(case, cell).status is Status.AGREE
