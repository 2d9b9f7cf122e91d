"""Exact probes: each is right in a right kernel, and says of a wrong one exactly what it did."""

from typing import Any

import pytest
import torch

import cases
from cases import defects, probes
from cases.case import Case
from cases.sdpa import SdpaCase
from harness import profiles
from harness.diagnosis import Diagnosis
from harness.power import planted
from harness.record import Record, Status
from harness.run import judge
from harness.search import search


def first(op: str) -> tuple[Case, ...]:
    module = cases.load(op)
    return probes.first(op, frozenset(module.FEATURES), module.DTYPES)


def faulty(op: str, name: str) -> Any:
    """The reference with the fault, rounded into the dtypes that the case asks for."""
    (defect,) = [d for d in defects.load(op) if d.name == name]

    def run(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        answer = defect.answer(case, tensors)
        answer = case.expected(tensors) if answer is None else answer
        return {n: answer[n].to(getattr(torch, dtype)) for n, dtype in case.output_dtypes().items()}

    return run


@pytest.mark.parametrize("op", cases.OPS)
def test_a_right_kernel_passes_every_probe(op):
    cell = planted.cell(op, planted.faithful(op))
    for case in first(op):
        record = judge(case, cell)
        assert (record.status, record.excess) == (Status.AGREE, 0), (
            f"{case.to_json()}: {record.why}"
        )


@pytest.mark.parametrize("op", cases.OPS)
def test_a_probe_is_a_case_like_any_other(op):
    for case in first(op):
        assert type(case).from_json(case.to_json()) == case
        assert case.structured
    for case in probes.first(op, frozenset(), cases.load(op).DTYPES):
        assert case.features() == frozenset()


READINGS = (
    ("sdpa", "window-plus-one", "query row 0 sees keys 1..4, expected 2..4: W+1 keys visible"),
    ("sdpa", "window-minus-one", "query row 0 sees keys 3..4, expected 2..4: W-1 keys visible"),
    ("sdpa", "last-key-missing", "query row 0 sees keys 0..7, expected 0..8"),
    ("sdpa", "upper-left", "query row 0 sees keys 0, expected 0..4"),
    ("sdpa", "causal-plus-one", "query row 0 sees keys 0..5, expected 0..4"),
    ("sdpa", "sink-dropped", "the sink weighs 0 keys, expected 0.01688"),
    ("sdpa", "heads-tiled", "reads values of request 1, kv head 1, expected request 1, kv head 0"),
    ("sdpa", "softcap-ignored", "the score of key 3 lies 1.5 above that of key 0, expected 1.27"),
    ("sdpa", "alibi-ignored", "score of key 7 lies -0.5 above that of key 0, expected 3"),
    ("sdpa", "scale-plus-0.1%", "scores are 1.001 x what they should be"),
    ("mla", "last-key-missing", "position 6, head 0 sees keys 0..5 of request 0, expected 0..6"),
    ("mla", "prefix-ignored", "position 4, head 0 sees keys 4 of request 0, expected 0..4"),
    ("mla", "stale-page", "sees keys 0..5 (5 more than once) of request 0, expected 0..6"),
    ("mla", "stale-page", "what it misses lies in page 12"),
    ("mla", "table-as-identity", "reads poison: rows that are no request's, or not written yet"),
    ("mla", "mscale-missing", "scores are 0.62899 x what they should be"),
    ("bmm", "vnni-pair-swapped", "is b[k 3, column 0], expected b[k 2, column 0]"),
    ("bmm", "first-b-for-all", "batch 1, row 0, column 0 is b[batch 0, k 1, column 0]"),
    ("bmm", "odd-k-dropped", "row 4, column 0 is nothing, expected b[k 4, column 0]"),
    ("bmm", "last-column-doubled", "column 5 is b[k 0, column 4], expected b[k 0, column 5]"),
    ("yarn", "position-plus-one", "query at position 300, key at 0, pair 0: turned by -0.5929 rad, "
        "expected -1.593: as if 1 position further apart"),
    ("yarn", "mscale-twice", "logits are 1.2965 x what they should be, and turned rightly"),
)  # fmt: skip


@pytest.mark.parametrize(("op", "name", "said"), READINGS)
def test_a_probe_reads_what_the_kernel_did(op, name, said):
    cell = planted.cell(op, faulty(op, name))
    told = [record.why for record in (judge(case, cell) for case in first(op))]
    assert any(said in why for why in told), "\n".join(told)


def test_a_mask_is_read_as_it_is():
    case = dict(cases.load("banded_mask").PINNED)["gemma-3-4b-decode"]
    record = judge(case, planted.cell("banded_mask", faulty("banded_mask", "window-plus-one")))
    assert (
        "query 0 sees tokens 0..1024, expected 1..1024: 1025 where the window is 1024" in record.why
    )


def test_the_lse_is_read_as_a_number_of_keys():
    def run(case: Any, tensors: Any) -> Any:
        answer = planted.faithful("sdpa")(case, tensors)
        return {**answer, "lse": answer["lse"] / 2}

    case = SdpaCase(
        dtype="float32", seed=1, values="mask_probe", batch=1, q_len=1, kv_len=4, heads=1,
        kv_heads=1, head_dim=8, lse=True,
    )  # fmt: skip
    assert "lse counts 2 keys, expected 4" in judge(case, planted.cell("sdpa", run)).why


def test_probes_come_first_and_a_finding_is_read_in_its_own_shape():
    kept: list[Record] = []
    found = search(
        planted.cell("sdpa", faulty("sdpa", "window-plus-one")),
        profiles.load("premerge"), 0, kept.append, examples=12,
    )  # fmt: skip
    assert [record.case for record in kept[:3]] == [case.to_json() for case in first("sdpa")[:3]]
    assert found is not None
    assert found.fault == "window-plus-one"
    assert "the mask probe of this shape: request 0, head 0, query row 0 sees keys" in found.why


SMALLEST = SdpaCase(
    dtype="float32", seed=0, values="normal", batch=1, q_len=1, kv_len=2, heads=1, kv_heads=1,
    head_dim=8, causal=True, window=1,
)  # fmt: skip


@pytest.mark.parametrize("name", ["window-plus-one", "window-ignored", "window-ignored-in-decode"])
def test_faults_that_are_one_in_the_smallest_case_are_told_apart_on_others(name):
    cell = planted.cell("sdpa", faulty("sdpa", name))
    diagnosis = Diagnosis(cell, SMALLEST)
    assert len(diagnosis.candidates) > 1
    for case in first("sdpa"):
        diagnosis.ask(case)
    assert [defect.name for defect in diagnosis.candidates] == [name]
    told = diagnosis.told(judge(SMALLEST, cell), SMALLEST)
    assert (told.status, told.fault) == (Status.DISAGREE, name)


def test_a_wrong_answer_of_another_kind_is_given_no_name():
    def run(case: Any, tensors: Any) -> Any:
        out = planted.faithful("sdpa")(case, tensors)["out"]
        return {"out": out.flip(-1)}

    cell = planted.cell("sdpa", run)
    diagnosis = Diagnosis(cell, SMALLEST)
    for case in first("sdpa"):
        diagnosis.ask(case)
    assert diagnosis.told(judge(SMALLEST, cell), SMALLEST).fault == ""


def test_a_name_has_to_hold_in_cases_that_are_answered_rightly():
    """Wrong in one place only, where it happens to look like a fault of the dictionary."""
    right, wrong = planted.faithful("sdpa"), faulty("sdpa", "window-plus-one")

    def run(case: Any, tensors: Any) -> Any:
        return (wrong if case.q_len > case.kv_len // 2 and case.window == 1 else right)(
            case, tensors
        )

    claims = frozenset({"causal", "window"})
    cell = planted.cell("sdpa", run, claims=claims, dtypes=("float32",))
    found = search(cell, profiles.load("premerge"), 0, lambda record: None, pinned=False)
    assert found is not None
    assert found.fault == ""
    assert "in this case as if " in found.why
    assert ", in others not" in found.why
