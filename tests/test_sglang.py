"""sglang on trial, where its environment is built: bugs planted into it, and whole models."""

import json
import subprocess
from typing import Any

import pytest

from harness.environments.source import ROOT
from harness.record import BAD, Status
from harness.run import judge
from tests import planted_sglang
from tests.planted_cells import caught, ordinary, planted
from tests.planting import case_of

PLANTS = pytest.mark.parametrize(
    "plant", [pytest.param(plant, id=plant.name) for plant in planted_sglang.PLANTS]
)


@PLANTS
def test_a_bug_planted_into_sglang_is_caught_and_shrunk(plant):
    case, tried = caught(plant, planted_sglang.__name__)
    assert case.work <= min(case_of(r).work for r in tried if r.status in BAD)


@PLANTS
def test_a_bug_planted_into_sglang_is_named(plant):
    cell = planted(plant, planted_sglang.__name__)
    record = judge(plant.telling, cell)
    assert record.status is Status.DISAGREE, record.why
    assert record.fault in plant.faults, record.why


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """What whole models answered in sglang's own Python."""
    cell = ordinary("sglang.sdpa.mlx_gpt_oss")
    assert cell.place is not None
    done = subprocess.run(
        [*cell.place.command, "-m", "tests.whole_sglang"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_contiguous", "llama", "qwen3", "qwen3_pool"])
def test_a_model_served_in_a_batch_writes_what_it_writes_alone(whole, name):
    """Greedy ids of prompts on both sides of the window, against mlx_lm's model as it is."""
    assert whole[name]["served"] == whole[name]["alone"]


@pytest.mark.parametrize("name", ["gpt_oss_without_sinks", "gpt_oss_without_window"])
def test_a_bug_in_the_served_model_changes_what_it_writes(whole, name):
    """The comparison of whole models can fail."""
    assert all(
        served != alone
        for served, alone in zip(whole[name]["served"], whole[name]["alone"], strict=True)
    )


def test_both_spellings_of_scale_and_window_are_read(whole):
    windows = [[0, 8], [1, None]]
    assert whole["contracts"] == {
        "gpt_oss": {"scale": 0.25, "windows": windows, "attention": True},
        "llama": {"scale": 0.25, "windows": windows, "attention": True},
        "qwen3": {"scale": 0.25, "windows": [], "attention": True},
    }


def test_the_aot_gate_lets_plain_rope_alone_through(whole):
    """But for dynamic rope: sglang-aot-gate-takes-dynamic in known.toml."""
    assert [name for name, open_ in whole["gates"].items() if open_] == ["default"]


@pytest.mark.parametrize("name", ["ministral3_float32", "ministral3_bfloat16"])
def test_native_ministral3_is_that_of_transformers_bit_for_bit(whole, name):
    assert whole[name]["prompt"]
    assert whole[name]["cached"]
    assert whole[name]["ids"][0] == whole[name]["ids"][1]
