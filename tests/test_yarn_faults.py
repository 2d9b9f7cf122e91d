"""Wrong ropes on trial, as a user's own kernel meets them: held to the envelope, told by name."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from cases import defects, yarn
from cases.defects import Defect
from cases.yarn import YarnCase
from harness import profiles, programs
from harness.arithmetic.mode import DET
from harness.compare import compare
from harness.power import planted
from harness.record import Status
from harness.run import ask

DEFECTS = {defect.name: defect for defect in defects.load("yarn")}
PINNED = dict(yarn.PINNED)
PINNED["phi-3-mini-128k-300"] = replace(
    PINNED["phi-3-mini-128k-short"], offsets=(300,), key_offsets=(200,)
)
PINNED["ministral-3-three-requests"] = replace(
    PINNED["ministral-3-per-request"],
    offsets=(17000, 33000, 50000),
    key_offsets=(16990, 32990, 49990),
    rotated=True,
)
"""Two more: off the boundary where two faults are one, and where float32 angles are still sharp."""


def rounded(case: YarnCase, answer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An exact answer, rounded once into the dtypes that the case asks for."""
    return {n: answer[n].to(getattr(torch, dtype)) for n, dtype in case.output_dtypes().items()}


def faulty(defect: Defect) -> Any:
    def run(case: YarnCase, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        answer = defect.answer(case, tensors)
        return rounded(case, case.expected(tensors) if answer is None else answer)

    return run


@functools.cache
def drawn(dtype: str) -> tuple[YarnCase, ...]:
    found = []

    @seed(0)
    @settings(
        max_examples=profiles.load("premerge").examples,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(case=yarn.strategy(frozenset(yarn.FEATURES), (dtype,)))
    def draw(case: YarnCase) -> None:
        found.append(case)

    draw()
    return tuple(found)


def test_draws_do_not_repeat_themselves():
    """Hypothesis mutates what it drew; a small budget must not go to twins."""
    assert len(set(drawn("float32"))) == len(drawn("float32"))


@pytest.mark.parametrize("dtype", yarn.DTYPES)
def test_every_fault_leaves_the_envelope_within_the_premerge_budget(dtype):
    """By drawn cases alone, and by nothing that is known of the kernel but its dtype."""
    alive, envelope = dict(DEFECTS), programs.envelope("yarn")
    for case in drawn(dtype):
        inputs = case.inputs()
        bound = envelope(case, inputs, DET)
        assert compare(rounded(case, case.expected(inputs)), bound, {}).allowed
        for name, defect in list(alive.items()):
            wrong = defect.answer(case, inputs)
            if wrong is not None and not compare(rounded(case, wrong), bound, {}).allowed:
                del alive[name]
    assert not alive


@pytest.mark.parametrize("dtype", yarn.DTYPES)
@pytest.mark.parametrize(
    ("factor", "given_", "said"),
    [
        (128.0, None, "logits are scaled by 2.2058 instead of 1.4852 on each side"),
        (40.0, None, "logits are scaled by 1.8739 instead of 1.3689 on each side"),
        (1.05, None, "logits are scaled by 1.0098 instead of 1.0049 on each side"),
        (32.0, 1.1, "logits are scaled by 1.2100 instead of 1.1000 on each side"),
    ],
)
def test_mscale_applied_twice_is_told_in_a_sentence(dtype, factor, given_, said):
    case = replace(PINNED["qwen-3-8b-yarn"], dtype=dtype, factor=factor, attention_factor=given_)
    record = ask(case, planted.cell("yarn", faulty(DEFECTS["mscale-twice"])))
    assert record.status is Status.DISAGREE
    assert record.why.startswith(said)
    assert "mscale applied twice" in record.why


@pytest.mark.parametrize("dtype", yarn.DTYPES)
@pytest.mark.parametrize(
    ("pinned", "fault"),
    [
        ("laguna-attention-factor-1.1", "attention-factor-ignored"),
        ("laguna-attention-factor-1.1", "attention-factor-as-multiplier"),
        ("laguna-xs-factor-32", "attention-factor-one"),
        ("deepseek-v3", "softmax-mscale-missing"),
        ("gpt-oss-20b-frequencies", "truncate-ignored"),
        ("deepseek-v3-frequencies", "beta-swapped"),
        ("llama-3.1-8b-frequencies", "base-off-by-0.01%"),
        ("llama-3.1-8b", "pairs-swapped"),
        ("llama-3.1-8b", "position-plus-one"),
        ("llama-3.1-8b", "offset-dropped"),
        ("laguna-xs-factor-32", "partial-ignored"),
        ("llama-3.1-8b", "angles-bfloat16"),
        ("phi-3-mini-128k-300", "always-long"),
        ("ministral-3-three-requests", "temperature-of-the-first-request"),
    ],
)
def test_a_planted_fault_is_named(pinned, fault, dtype):
    case = replace(PINNED[pinned], dtype=dtype)
    record = ask(case, planted.cell("yarn", faulty(DEFECTS[fault])))
    assert record.status is Status.DISAGREE
    assert record.fault == fault, record.why
