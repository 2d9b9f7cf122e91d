"""The search on trial: it finds, shrinks, repeats itself, and keeps the right records."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from harness import profiles
from harness.engines.torch.sdpa import MATH
from harness.power import planted
from harness.record import BAD, Status
from harness.search import search

ROOT = Path(__file__).resolve().parent.parent
PROFILE = profiles.load("premerge")
RIGHT = planted.faithful("sdpa", MATH)


def found(run, claims=frozenset({"causal", "window", "sinks", "layout"}), seed=0, examples=40):
    kept = []
    cell = planted.cell("sdpa", run, MATH, claims=claims, dtypes=("float32",))
    record = search(cell, PROFILE, seed, kept.append, examples=examples, pinned=False)
    return record, kept


def wrong_window(case, t):
    """W+1 keys."""
    if case.window is None:
        return RIGHT(case, t)
    wide = dataclasses.replace(case, window=case.window + 1)
    return RIGHT(wide, {**t, "visible": wide.inputs()["visible"]})


def test_a_right_subject_leaves_nothing():
    record, kept = found(RIGHT)
    assert record is None
    assert len(kept) == 40
    assert not {r.status for r in kept} & BAD


def test_a_finding_is_shrunk_to_few_small_and_featureless():
    record, kept = found(wrong_window)
    assert record is not None
    assert record.fault == "window-plus-one"
    assert "window off by one: W+1 keys visible" in record.why
    case = planted.cases.load("sdpa").CASE.from_json(record.case)
    assert case.features() == {"causal", "window"}
    assert (case.batch, case.q_len, case.heads) == (1, 1, 1)
    assert case.kv_len <= 3
    assert [r for r in kept if r.status in BAD][-1].case_id == record.case_id


def test_tries_of_the_shrinker_are_not_kept():
    _, kept = found(wrong_window)
    assert sum(r.status in BAD for r in kept) <= 2


DRAWN = """
import sys
sys.path[:0] = [{root!r}, {local!r}]
{first}
from harness.power import questions
for case in questions.drawn("yarn", "float32", 40, questions.kinds("yarn")[0]):
    print(case.id)
"""


def test_what_is_drawn_does_not_depend_on_what_is_imported(tmp_path):
    """Hypothesis would draw from the constants in imported local files."""
    (tmp_path / "constants.py").write_text(f"MANY = {tuple(range(1000, 3000, 7))}\n")
    told = [
        subprocess.run(
            [sys.executable, "-c",
             DRAWN.format(root=str(ROOT), local=str(tmp_path), first=first)],
            capture_output=True, text=True, check=True, cwd=tmp_path,
        ).stdout
        for first in ("", "import constants")
    ]  # fmt: skip
    assert told[0].count("\n") == 40
    assert told[0] == told[1]


def test_a_search_repeats_itself_and_another_seed_asks_otherwise():
    asked = [[r.case for r in found(RIGHT, seed=seed)[1]] for seed in (0, 0, 1)]
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


def test_an_answer_that_changes_from_call_to_call_is_an_error():
    calls = []

    def run(case, t):
        calls.append(1)
        out = RIGHT(case, t)
        if len(calls) == 7:
            out["out"] = out["out"] + 1
        return out

    record, _ = found(run)
    assert record is not None
    assert record.status is Status.ERROR or "two calls" in record.why
    if record.status is Status.ERROR:
        assert "not repeatable" in record.why


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_a_profile_asks_more_than_it_demands(name):
    profile = profiles.load(name)
    assert profile.least <= profile.examples


def test_an_unknown_profile_is_named():
    with pytest.raises(ValueError, match="profile='weekly' is unknown; expected one of premerge"):
        profiles.load("weekly")
