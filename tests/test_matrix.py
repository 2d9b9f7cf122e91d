"""The matrix shows every cell, adds up right, and fits a terminal."""

import math
from dataclasses import replace

import pytest

from harness.record import Record, Status
from reports import matrix, summary

AGREES = Record(
    op="sdpa",
    subject="transformers.sdpa.gpt_oss_eager",
    lane="cpu",
    tier="hardware",
    status=Status.AGREE,
    excess=0.75,
    exact=99_999_999,
    elements=100_000_000,
)
ABSENT = replace(
    AGREES, lane="cuda", tier="absent", status=Status.ABSENT, why="torch.cuda is not available"
)
EMULATED = replace(
    AGREES, subject="mlx.sdpa.fast", lane="mps", tier="emulated", exact=0, program="envelope"
)


def test_row_adds_up() -> None:
    refused = replace(AGREES, status=Status.REFUSED, excess=0.0, exact=0, elements=0)
    drift = replace(AGREES, status=Status.DRIFT, excess=4.0)
    (row,) = summary.rows([AGREES, AGREES, refused, drift, ABSENT])
    assert (row.judged, row.bad, row.count[Status.REFUSED]) == (3, 1, 1)
    assert (row.excess, row.elements, row.program) == (4.0, 300_000_000, "declared")


def test_nearly_exact_does_not_read_as_exact() -> None:
    assert "0.9999" in matrix.text([AGREES])
    assert "1.0000" not in matrix.text([AGREES])


@pytest.mark.parametrize("width", [100, 120])
def test_fits_the_terminal(width: int) -> None:
    bad = [
        replace(AGREES, status=status, excess=math.inf)
        for status in (Status.DISAGREE, Status.DRIFT, Status.ERROR, Status.SUSPECT, Status.KNOWN)
    ]
    lines = matrix.text([AGREES, *bad, EMULATED], width=width).splitlines()
    assert max(map(len, lines)) <= width
    head = " ".join(lines[:2]).split()
    for name in ("subject", "lane", "tier", "program", "judged", "agree", "fused", "ous", "known",
                 "pect", "drift", "error", "excess", "exact"):  # fmt: skip
        assert name in head
    assert "hardware declared" in " ".join(" ".join(lines).split())
    assert " inf 0.9999" in "".join(lines)


def test_clean_matrix_says_what_no_cell_has() -> None:
    text = matrix.text([AGREES, EMULATED])
    assert "No cell has known, suspect, drift, disagree or error." in text


def test_absent_cells_share_their_reason() -> None:
    absent = [replace(ABSENT, subject=f"torch.sdpa.{i}") for i in range(6)]
    text = matrix.text([AGREES, *absent])
    assert text.count("absent  cuda") == 1
    assert "and 2 more" in text
    assert "cuda: absent: torch.cuda is not available (6 cells)" in text


def test_known_divergences_are_named_with_their_cases() -> None:
    known = [
        replace(AGREES, status=Status.KNOWN, why=f"{name}: the sentence: of the entry")
        for name in ("upper-left", "dead-rows", "dead-rows")
    ]
    for text in (matrix.text([AGREES, *known]), matrix.markdown([AGREES, *known])):
        assert "known   sdpa: dead-rows (2), upper-left (1)\n" in text
    assert "known   " not in matrix.text([AGREES])


def test_lane_sentences() -> None:
    wrong = replace(AGREES, status=Status.DISAGREE)
    assert summary.lanes([AGREES, wrong, EMULATED]) == [
        "cpu: hardware, 1 cell judged 2 cases: 1 disagree",
        "mps: emulated, 1 cell judged 1 case: nothing wrong",
    ]


def test_a_lane_that_judged_nothing_is_not_called_right() -> None:
    (said,) = summary.lanes([replace(AGREES, status=Status.REFUSED)])
    assert said == "cpu: hardware, 1 cell judged 0 cases (1 refused)"


def test_no_record_is_said() -> None:
    assert "nothing was asked" in matrix.text([])


def test_markdown_has_every_column_and_marks_what_is_bad() -> None:
    text = matrix.markdown([AGREES, replace(AGREES, status=Status.ERROR), ABSENT])
    head, rule, row, *_ = text.splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert "**1**" in row
    assert "- cuda: absent: torch.cuda is not available (1 cell)" in text
