"""Lanes on trial, as a user calls them: nothing is skipped in silence."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness import runtimes
from harness.lane import Tier
from harness.rundir import latest, read_run

ROOT = Path(__file__).resolve().parent.parent


def run(tmp_path: Path, *words: str) -> tuple[int, str]:
    """A pytest session of its own over the attention cells: its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--cases", "6",
         "--runs", str(tmp_path), "tests/test_sdpa.py", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


GONE = [name for name in ("amx", "cuda") if runtimes.presence("torch", name).tier is Tier.ABSENT]
WITHOUT = " or ".join(GONE)


def test_lanes_without_hardware_say_so_and_pass(tmp_path):
    code, said = run(tmp_path, "-m", WITHOUT, "--engine", "torch")
    assert code == 0, said
    for name in GONE:
        assert f"{name}: absent: {runtimes.presence('torch', name).reason}" in said
    assert " absent in " in said
    assert "passed" not in said
    _, records = read_run(latest(tmp_path))
    assert {record.status.value for record in records} == {"absent"}


def test_required_lanes_that_are_absent_fail_with_a_sentence(tmp_path):
    demands = [word for name in GONE for word in ("--require-lane", name)]
    code, said = run(tmp_path, "-m", WITHOUT, "--engine", "torch", *demands)
    assert code == 1
    for name in GONE:
        assert f"finding: --require-lane {name}: absent: " in said


def test_a_tier_can_be_demanded(tmp_path):
    demand = ["-m", "mps", "--engine", "mlx", "--require-lane"]
    tier = runtimes.presence("mlx", "mps").tier
    other = Tier.HARDWARE if tier is Tier.EMULATED else Tier.EMULATED
    code, said = run(tmp_path / "met", *demand, f"mps:{tier}")
    assert code == 0, said
    assert f"mps: {tier}, " in said
    code, said = run(tmp_path / "unmet", *demand, f"mps:{other}")
    assert code == 1
    assert f"finding: --require-lane mps:{other}: the lane ran {tier}, not on {other}" in said


def test_the_cpu_lane_is_required_by_default(tmp_path):
    code, said = run(tmp_path, "-m", "cpu", "--engine", "torch", "-k", "math")
    assert code == 0, said
    assert "cpu: hardware, 1 cell judged" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--require-lane", "tpu"], "lane='tpu' is unknown; expected one of cpu, amx, mps, cuda"),
        (["--engine", "mlxx"], "engine='mlxx' is unknown; expected one of "),
    ],
)
def test_nonsense_is_refused_with_a_sentence(tmp_path, words, sentence):
    code, said = run(tmp_path, *words)
    assert code != 0
    assert sentence in said
    assert "Traceback" not in said


def test_two_workers_judge_as_one(tmp_path):
    """The same cases and the same verdicts, however the cells are shared out."""
    judged = []
    for name, workers in (("one", "0"), ("two", "2")):
        code, said = run(
            tmp_path / name, "-m", "cpu", "--engine", "torch", "-k", "math or flash", "-n", workers
        )
        assert code == 0, said
        _, records = read_run(latest(tmp_path / name))
        judged.append(
            sorted((r.subject, r.case_id, r.status.value, r.excess, r.exact) for r in records)
        )
    assert judged[0] == judged[1]


WANTING = """
import pytest
from harness.campaign import Absent

@pytest.fixture(scope="module")
def engine():
    raise Absent("no such engine here")

def test_one(engine):
    assert False

def test_two(engine):
    assert False
"""


def test_a_test_whose_fixture_finds_an_engine_absent_is_absent(tmp_path):
    (tmp_path / "test_wanting.py").write_text(WANTING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider",
         "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 absent in " in done.stdout
