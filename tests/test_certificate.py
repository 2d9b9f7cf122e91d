"""Certificates on trial: what they promise is kept, and a generator that lost its teeth is seen."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import cases
from cases import defects, probes
from cases.banded_mask import BandedMaskCase
from cases.case import Case
from harness import profiles, programs
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import DET
from harness.cells import cells
from harness.certificate import certify, coarse, strengths
from harness.compare import compare
from harness.power import planted
from harness.record import Status
from harness.run import judge
from reports import certificates

DRAWN = profiles.load("premerge").examples


@functools.cache
def generated(op: str, dtype: str, count: int = DRAWN) -> tuple[Case, ...]:
    """What a search that claims everything begins with."""
    module = cases.load(op)
    claims, found = frozenset(module.FEATURES), []

    @seed(0)
    @settings(
        max_examples=count, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(case=module.strategy(claims, (dtype,)))
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return (*probes.first(op, claims, (dtype,)), *found)


@pytest.mark.parametrize("op", cases.OPS)
def test_no_fault_of_the_dictionary_can_pass_the_generator(op):
    dtype = cases.load(op).DTYPES[0]
    found = certify(op, programs.envelope(op), generated(op, dtype))
    assert coarse(op, found) == []


def test_a_generator_that_never_clips_a_window_has_too_coarse_a_certificate():
    open_ = [
        replace(case, window=None if case.window is None else case.offset + case.n)
        for case in generated("banded_mask", "bool")
        if isinstance(case, BandedMaskCase) and case.size is None
    ]
    said = coarse("banded_mask", certify("banded_mask", programs.envelope("banded_mask"), open_))
    assert any("window-plus-one of strength inf could pass all" in line for line in said)


def test_a_radius_that_passes_everybody_has_too_coarse_a_certificate():
    envelope = programs.envelope("yarn")

    def wide(case, inputs, mode):
        return {n: MidRad(x.mid, x.rad * 1e6) for n, x in envelope(case, inputs, mode).items()}

    asked = generated("yarn", "float32", 6)
    assert len(coarse("yarn", certify("yarn", wide, asked))) > len(defects.load("yarn")) / 2


@pytest.mark.parametrize("name", ["scale-plus-0.1%", "window-plus-one", "last-key-missing"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_defect_above_the_certified_strength_is_rejected_however_the_kernel_rounds(name, dtype):
    """The kernel errs as far as its program lets it, against the defect."""
    case = cases.load("sdpa").CASE(
        dtype=dtype, seed=3, values="normal", batch=1, q_len=3, kv_len=20, heads=2, kv_heads=1,
        head_dim=8, causal=True, window=5,
    )  # fmt: skip
    (defect,) = [d for d in defects.load("sdpa") if d.name == name]
    inputs, envelope = case.inputs(), programs.envelope("sdpa")
    least = strengths(envelope, case, (defect,))[name]
    assert math.isfinite(least)
    wrong, allowed = defect.answer(case, inputs), envelope(case, inputs, DET)
    assert wrong is not None
    shift = wrong["out"] - case.expected(inputs)["out"]
    for strength, passes in ((1.001 * least, False), (0.0, True)):
        kindest = allowed["out"].mid + strength * shift - shift.sign() * allowed["out"].rad
        observed = planted.rounded(case, {"out": MidRad(kindest)})
        assert compare(observed, allowed, {}).allowed is passes


def test_a_fresh_draw_is_promised_less_than_the_cases_that_were_asked():
    found = certify("yarn", programs.envelope("yarn"), generated("yarn", "float32", 6))
    assert all(c.sure <= c.fresh for c in found)
    assert any(c.sure < c.fresh for c in found)
    (empty,) = {c.sure for c in certify("yarn", programs.envelope("yarn"), ())}
    assert empty == torch.inf


def test_a_run_has_a_row_for_every_program_that_was_asked():
    case = dict(cases.load("banded_mask").PINNED)["gpt-oss-chunked-prefill"]
    cell = next(c for c in cells(["banded_mask"], ["native"], ["cpu"]) if c.presence.device)
    record = judge(case, cell)
    assert record.status is Status.AGREE
    (row,) = certificates.rows([record, replace(record, subject="gone.banded_mask.one")])
    assert (row.op, row.held_to) == ("banded_mask", "exact")
    assert row.subjects == (cell.subject.name,)
    assert "window-plus-one" not in row.unseen
    assert "left-padding-ignored" in row.unseen
    assert {c.sure for c in row.coarsest} == {0.5}
    assert certificates.rows([]) == []


def test_certificates_are_kept_in_a_finished_run_and_read_again(tmp_path):
    case = dict(cases.load("banded_mask").PINNED)["gpt-oss-chunked-prefill"]
    cell = next(c for c in cells(["banded_mask"], ["native"], ["cpu"]) if c.presence.device)
    records = [judge(case, cell)]
    going_on = certificates.of_run(tmp_path, records, complete=False)
    assert not list(tmp_path.iterdir())
    made = certificates.of_run(tmp_path, records, complete=True)
    assert [path.name for path in tmp_path.iterdir()] == [certificates.FILE]
    assert made == going_on
    assert any(math.isinf(c.sure) for c in made[0].certificates)
    assert certificates.of_run(tmp_path, [], complete=True) == made
