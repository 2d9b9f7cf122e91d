"""The gate fails on everything that is not a clean run, each time with a sentence."""

import math
from dataclasses import replace

import pytest

from harness.gate import FALSE_ALARM, findings, requirement, suspects_by_chance
from harness.record import Record, Status

AGREES = Record(
    op="sdpa",
    subject="torch.sdpa.math",
    lane="cpu",
    tier="hardware",
    status=Status.AGREE,
    case_id="0123456789ab",
    excess=0.5,
    exact=90,
    elements=100,
)
CLEAN = [AGREES] * 20
ABSENT = replace(
    AGREES, lane="cuda", tier="absent", status=Status.ABSENT, why="torch.cuda is not available"
)


def test_clean_run_passes() -> None:
    assert findings([*CLEAN, ABSENT], required=["cpu", "cpu:hardware"], minimum=20) == []


def test_known_refused_and_few_vacuous_cases_are_no_finding() -> None:
    others = [
        replace(AGREES, status=status) for status in (Status.KNOWN, Status.REFUSED, Status.VACUOUS)
    ]
    assert findings(CLEAN + others) == []


@pytest.mark.parametrize("status", [Status.DISAGREE, Status.DRIFT])
def test_wrong_answers_are_named_with_the_worst_case(status: Status) -> None:
    bad = replace(AGREES, status=status, excess=3.0, why="out[0] is 2.0, expected 1", case_id="bad")
    worse = replace(bad, excess=math.inf, why="out is empty", case_id="worse")
    assert findings([*CLEAN, bad, worse]) == [
        f"torch.sdpa.math@cpu: {status} in 2 cases; e.g. case worse: out is empty"
    ]


def test_error_shows_the_exception() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: no kernel'
    bad = replace(AGREES, status=Status.ERROR, excess=math.inf, why=trace)
    (finding,) = findings([*CLEAN, bad])
    assert finding.endswith("error in 1 case; e.g. case 0123456789ab: RuntimeError: no kernel")


def test_each_cell_is_judged_for_itself() -> None:
    bad = replace(AGREES, subject="mlx.sdpa.fast", status=Status.DISAGREE, why="wrong")
    assert len(findings([*CLEAN, bad])) == 1


def test_zero_records() -> None:
    (finding,) = findings([], required=["cpu"])
    assert finding.startswith("nothing was judged")


def test_cell_that_judged_too_little() -> None:
    (finding,) = findings(CLEAN, minimum=21)
    assert "judged 20 cases, expected at least 21" in finding


def test_a_cell_can_have_a_minimum_of_its_own() -> None:
    assert findings(CLEAN, minimum=50, minimums={AGREES.cell: 20}) == []
    assert findings(CLEAN, minimum=1, minimums={AGREES.cell: 21})


def test_cell_without_any_record() -> None:
    (finding,) = findings(CLEAN, cells=[("sdpa", "mlx.sdpa.fast", "mps")])
    assert finding == "mlx.sdpa.fast@mps: no record: the cell was to be asked and was not"


def test_cell_that_refused_everything() -> None:
    refused = replace(AGREES, status=Status.REFUSED, why="float32 is not supported")
    (finding,) = findings([refused] * 7)
    assert finding == ("torch.sdpa.math@cpu: refused all 7 cases, mostly: float32 is not supported")


def test_only_vacuous_or_known_cases_judge_nothing() -> None:
    for status in (Status.VACUOUS, Status.KNOWN):
        found = findings([replace(AGREES, status=status, why="hidden")] * 5)
        assert any("judged 0 cases" in finding for finding in found)


def test_known_cases_count_beside_judged_ones() -> None:
    """An engine may be wrong in one dtype of several, as long as the others are judged."""
    known = [replace(AGREES, status=Status.KNOWN)]
    assert findings(CLEAN[:5] + known * 5, minimum=10) == []
    (finding,) = findings(CLEAN[:5] + known * 4, minimum=10)
    assert "judged 5 cases, expected at least 10 (4 known)" in finding


def test_too_many_vacuous_cases() -> None:
    vacuous = replace(AGREES, status=Status.VACUOUS, why="window clips no key")
    (finding,) = findings(CLEAN + [vacuous] * 7)
    assert "7 of 27 cases could not tell right from wrong, more than 25%" in finding
    assert "window clips no key" in finding
    assert findings(CLEAN + [vacuous] * 6) == []
    assert findings(CLEAN[:3] + [vacuous] * 3) == []  # too few for a share


def test_required_lane_that_is_absent() -> None:
    assert findings([*CLEAN, ABSENT], required=["cuda"]) == [
        "--require-lane cuda: absent: torch.cuda is not available"
    ]


def test_required_lane_without_any_subject() -> None:
    assert findings(CLEAN, required=["amx"]) == [
        "--require-lane amx: absent: no subject was put to it"
    ]


def test_required_lane_that_judged_too_little() -> None:
    refused = replace(AGREES, lane="mps", status=Status.REFUSED, why="window not claimed")
    found = findings([*CLEAN, refused], required=["mps"])
    assert found[0] == "--require-lane mps: judged 0 cases, expected at least 1"
    assert findings(CLEAN, required=["cpu"], lane_minimum=21)[0].startswith("--require-lane cpu")


def test_required_tier() -> None:
    emulated = [replace(AGREES, lane="mps", tier="emulated")] * 3
    assert findings(emulated, required=["mps", "mps:emulated"]) == []
    assert findings(emulated, required=["mps:hardware"]) == [
        "--require-lane mps:hardware: the lane ran emulated, not on hardware"
    ]
    absent = replace(ABSENT, lane="amx", why="this CPU has no AMX tiles")
    assert findings([*CLEAN, absent], required=["amx:hardware"]) == [
        "--require-lane amx:hardware: absent: this CPU has no AMX tiles"
    ]


@pytest.mark.parametrize("text", ["gpu", "cuda:real", "amx:absent", "amx:", ""])
def test_unknown_requirement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        requirement(text)


def test_suspects_beyond_chance() -> None:
    suspect = replace(AGREES, status=Status.SUSPECT, excess=1.01)
    assert findings([*CLEAN, suspect]) == []
    (finding,) = findings([*CLEAN, suspect, suspect])
    assert "2 suspects among 2200 elements, chance explains at most 1" in finding


@pytest.mark.parametrize("elements", [1, 10**4, 10**7, 10**9])
def test_chance_rule_keeps_its_promise(elements: int) -> None:
    """The exact Poisson tail above the accepted number stays below the promised rate."""
    mu = 2 * math.exp(-18) * elements
    most = suspects_by_chance(elements)
    head = sum(math.exp(k * math.log(mu) - mu - math.lgamma(k + 1)) for k in range(most + 1))
    tail = sum(
        math.exp(k * math.log(mu) - mu - math.lgamma(k + 1)) for k in range(most + 1, most + 400)
    )
    assert tail < FALSE_ALARM
    assert head > 0.99


def test_a_required_engine_that_is_absent_or_judged_too_little_fails():
    vllm = replace(ABSENT, subject="vllm.sdpa.paged", why="`parity env create vllm`")
    assert findings([*CLEAN, vllm], engines=["vllm"]) == [
        "--require-engine vllm: absent: `parity env create vllm`"
    ]
    assert findings(CLEAN, engines=["vllm"]) == [
        "--require-engine vllm: absent: no subject of it was asked"
    ]
    judged = replace(CLEAN[0], subject="vllm.sdpa.paged")
    assert findings([*CLEAN, vllm, judged], engines=["vllm"]) == []
    assert findings([*CLEAN, judged], engines=["vllm"], lane_minimum=2) == [
        "--require-engine vllm: judged 1 cases, expected at least 2"
    ]
