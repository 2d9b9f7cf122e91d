"""Where an answer is wrong is told in the op's own words: one fault in one known place, per op."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cases
from cases.banded_mask import BandedMaskCase
from cases.bmm import BmmCase
from cases.case import Case
from cases.mla import MlaCase
from cases.ranges import ranges
from cases.sdpa import SdpaCase
from cases.yarn import YarnCase
from harness.power import planted
from harness.run import judge

SDPA = SdpaCase(
    dtype="bfloat16", seed=1, values="normal", batch=2, q_len=5, kv_len=9, heads=4, kv_heads=2,
    head_dim=16, causal=True, schedule=(3, 1, 1), lse=True,
)  # fmt: skip
MASK = BandedMaskCase(dtype="bool", seed=1, n=6, offset=4, window=3, left_padding=(0, 6))
BMM = BmmCase(dtype="bfloat16", seed=1, values="normal", batch=2, m=7, n=6, k=5)
YARN = YarnCase(
    dtype="float32", seed=1, values="normal", batch=2, q_len=3, kv_len=4, heads=4, kv_heads=2,
    head_dim=16, base=10000.0, max_positions=4096, offsets=(300, 5), key_offsets=(0, 3),
    rotated=True, frequencies=True,
)  # fmt: skip
MLA = MlaCase(
    dtype="float32", seed=1, values="normal", batch=2, kv_len=7, heads=2, latent_dim=16,
    rope_dim=8, nope_dim=8, v_dim=8, q_len=3, q_lens=(3, 2), kv_lens=(7, 5), page_size=1,
    padding=1, stages=True,
)  # fmt: skip

PLACES: tuple[tuple[Case, str, tuple[Any, ...], str, str], ...] = (
    (
        SDPA, "out", (1, 3, 4, slice(None)), "at request 1, head 3, query row 4, column ",
        "out: 16 of 640 elements outside, all in request 1, head 3, query row 4, call 2",
    ),
    (
        SDPA, "lse", (0, 2, slice(0, 3)), "at request 0, head 2, query row ",
        "lse: 3 of 40 elements outside, all in request 0, head 2, query row 0..2, call 0",
    ),
    (
        MASK, "visible", (1, 2, 3), "visible[1, 2, 3] is True, expected 0",
        "visible: 1 of 120 elements outside, all in request 1, query 2, token 3",
    ),
    (
        BMM, "out", (1, slice(4, 6), 2), "at batch 1, row ",
        "out: 2 of 84 elements outside, all in batch 1, row 4..5, column 2",
    ),
    (
        YARN, "logits", (1, 2, 1, 3), "at request 1, head 2, query 1, key 3, query position 6, "
        "key position 6",
        "logits: 1 of 96 elements outside",
    ),
    (
        YARN, "q", (0, 1, 2, 13), "at request 0, head 1, query 2, column 13, query position 302, "
        "pair 5",
        "q: 1 of 384 elements outside",
    ),
    (YARN, "inv_freq", (1, 3), "at request 1, pair 3", "all in request 1, pair 3"),
    (
        MLA, "out", (4, 1, 6), "at request 1, position 4, head 1, column 6",
        "out: 1 of 80 elements outside, all in request 1, position 4, head 1, column 6",
    ),
    (
        MLA, "q_latent", (0, 0, 11), "at request 0, position 4, head 0, latent column 11",
        "q_latent: 1 of 160 elements outside",
    ),
)  # fmt: skip


def spoiled(name: str, where: tuple[Any, ...]) -> Callable[[Any, Any], Any]:
    def run(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        answer = planted.faithful(case.op)(case, tensors)
        part = answer[name][where]
        answer[name][where] = ~part if part.dtype == torch.bool else part + 64
        return answer

    return run


@pytest.mark.parametrize(
    ("case", "output", "where", "worst", "extent"),
    [pytest.param(*place, id=f"{place[0].op}-{place[1]}") for place in PLACES],
)
def test_the_place_of_a_planted_fault_is_told(case, output, where, worst, extent):
    record = judge(case, planted.cell(case.op, spoiled(output, where)))
    assert record.output == output
    assert worst in record.why
    assert extent in record.why


def test_a_wrong_row_of_the_cache_is_told_by_its_page_and_owner():
    inputs = MLA.inputs()
    page = int(inputs["table"][1, 2])
    record = judge(MLA, planted.cell("mla", spoiled("cache", (page, 0, 5))))
    assert f"at request 1, position 2, page {page}, row 0, column 5" in record.why


def test_observed_expected_and_allowed_stand_beside_the_place():
    record = judge(BMM, planted.cell("bmm", spoiled("out", (1, 4, 2))))
    truth = float(BMM.expected(BMM.inputs())["out"][1, 4, 2])
    assert f", expected {truth:.9g} within " in record.why
    assert "x what is allowed, at batch 1, row 4, column 2" in record.why


@pytest.mark.parametrize("op", cases.OPS)
def test_every_axis_of_every_output_has_a_name(op):
    module = cases.load(op)
    for _, case in module.PINNED:
        asked = [case]
        if op == "yarn":
            asked.append(replace(case, rotated=True, frequencies=True))
        if op == "mla":
            asked.append(replace(case, stages=True, lse=True))
        for other in asked:
            for name, shape in other.output_shapes().items():
                assert len(other.axes()[name]) == len(shape)


def test_ranges():
    assert ranges([]) == "none"
    assert ranges([3]) == "3"
    assert ranges([2, 3, 4, 9]) == "2..4, 9"
