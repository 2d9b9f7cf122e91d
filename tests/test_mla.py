"""Latent attention: every subject against the reference, on every lane; and its stages."""

from dataclasses import replace

import pytest
import torch

from cases import defects
from cases.mla import MlaCase
from harness import engines, faults, programs
from harness.arithmetic.mode import DET
from harness.power import planted
from harness.record import Record, Status
from harness.run import judge

RICH = MlaCase(
    dtype="bfloat16", seed=1, values="normal", batch=3, q_len=6, kv_len=40, heads=4,
    latent_dim=32, rope_dim=8, nope_dim=16, v_dim=16, mscale=1.3689, q_lens=(6, 2, 4),
    kv_lens=(33, 19, 40), page_size=16, splits=4, padding=2, lse=True,
)  # fmt: skip
[NATIVE] = [s for s in engines.subjects("native", "mla") if s.name == "native.mla.torch_extend"]
PROGRAM = NATIVE.programs["cpu"]


def test_agrees_with_reference(cell, campaign):
    campaign.judge(cell)


def judged(name: str, case: MlaCase) -> Record:
    """What comes of our kernel's arithmetic with the fault of that name."""
    [defect] = [d for d in defects.load("mla") if d.name == name]
    answer = planted.faulty(PROGRAM, defect, case, case.inputs())
    assert answer is not None
    return judge(case, planted.cell("mla", lambda case, tensors: answer, PROGRAM))


@pytest.mark.parametrize("name", [d.name for d in defects.load("mla")])
def test_the_matched_filter_names_the_planted_fault(name):
    """Within the envelope alone, on the reference's own answer: the fault is found by name."""
    case = RICH
    if name == "empty-part-merged":
        case = replace(case, kv_lens=(33, 9, 40), splits=8)  # of 9 keys, 5 parts have some
    if name == "page-ids-wrap":
        case = replace(case, kv_lens=(32, 16, 32))  # whole pages: no poison, which is alike in all
    if name == "operands-bfloat16":
        case = replace(case, dtype="float32")
    inputs = case.inputs()
    [defect] = [d for d in defects.load("mla") if d.name == name]
    wrong = defect.answer(case, inputs)
    assert wrong is not None
    observed = {key: x.to(getattr(torch, case.output_dtypes()[key])) for key, x in wrong.items()}
    bound = programs.envelope("mla")(case, inputs, DET)
    fault = faults.name(case, inputs, observed, bound, defects.load("mla"))
    assert fault is not None
    assert fault.defect.name == name


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("w-uk-transposed", "q_latent"),
        ("last-key-missing", "o_latent"),
        ("latent-column-dropped", "o_latent"),
        ("table-as-identity", "o_latent"),
        ("w-uv-transposed", "out"),
        ("k-pe-first", "cache"),
        ("stale-slots", "cache"),
    ],
)
def test_a_fault_is_seen_in_its_own_stage(name, stage):
    """Later stages are judged on what the faulty one gave them, so they are right."""
    record = judged(name, replace(RICH, stages=True))
    assert record.status is Status.DISAGREE
    assert record.output == stage
    assert record.fault == name


@pytest.mark.parametrize("stages", [False, True])
def test_a_right_answer_agrees_with_its_stages_or_without(stages):
    case = replace(RICH, stages=stages)
    cell = planted.cell("mla", planted.faithful("mla", PROGRAM), PROGRAM)
    assert judge(case, cell).status is Status.AGREE


def test_anchoring_sees_a_small_fault_that_the_end_dilutes():
    """A scale that is 0.1 % off, in bfloat16."""
    case = replace(RICH, stages=True, splits=1, mscale=None, kv_len=40, latent_dim=128)
    other = replace(case, mscale=1.0005)
    answer = planted.rounded(case, PROGRAM(other, case.inputs(), planted.mode(case)))
    record = judge(case, planted.cell("mla", lambda case, tensors: answer, PROGRAM))
    assert record.output in ("o_latent", "lse")
    assert record.status is not Status.AGREE
