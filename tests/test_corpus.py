"""The corpus on trial: what was found is kept once, whole, and asked first of everybody."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import cases
from cases.sdpa import SdpaCase
from harness import corpus, profiles
from harness.campaign import Campaign, Finding
from harness.corpus import Entry
from harness.engines.torch.sdpa import MATH
from harness.power import planted
from harness.record import Status

ROOT = Path(__file__).resolve().parent.parent
RIGHT = planted.faithful("sdpa", MATH)
CASE = SdpaCase(
    dtype="float32", seed=0, values="normal", batch=1, q_len=1, kv_len=2, heads=1, kv_heads=1,
    head_dim=8, causal=True, window=1,
)  # fmt: skip
ENTRY = Entry(
    case=CASE, subject="planted.sdpa.subject", lane="cpu", status="disagree", why="wrong",
    found="2026-11-30", fault="window-plus-one", versions={"torch": "2.13.0"},
)  # fmt: skip


def wrong_window(case, t):
    if case.window is None:
        return RIGHT(case, t)
    wide = replace(case, window=case.window + 1)
    return RIGHT(wide, {**t, "visible": wide.inputs()["visible"]})


def campaign(folder: Path | None, kept: list) -> Campaign:
    return Campaign(
        profile=profiles.load("premerge"), seed=0, keep=kept.append, examples=30, pinned=False,
        corpus=folder,
    )  # fmt: skip


def cell(run, claims=frozenset({"causal", "window"})):
    return planted.cell("sdpa", run, MATH, claims=claims, dtypes=("float32",))


def test_an_entry_survives_its_file(tmp_path):
    path = corpus.save(tmp_path, ENTRY)
    assert path == tmp_path / "sdpa" / f"{CASE.id}.json"
    assert corpus.read(tmp_path, "sdpa") == ((ENTRY,), ())
    assert corpus.read(tmp_path, "mla") == ((), ())
    assert corpus.find(tmp_path, CASE.id[:4]) == ENTRY
    assert corpus.find(tmp_path, "0" * 12) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_same_finding_is_saved_once_and_another_of_that_case_replaces_it(tmp_path):
    path = corpus.save(tmp_path, ENTRY)
    corpus.save(tmp_path, replace(ENTRY, found="2027-01-01"))
    assert json.loads(path.read_text())["found"] == "2026-11-30"
    corpus.save(tmp_path, replace(ENTRY, source="mine.py:attention", found="2027-01-01"))
    assert json.loads(path.read_text())["source"] == "mine.py:attention"


def test_processes_may_save_at_the_same_time(tmp_path):
    entries = [replace(ENTRY, subject=f"planted.sdpa.{i}") for i in range(32)]
    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(lambda entry: corpus.save(tmp_path, entry), entries)}) == 1
    (kept,), notes = corpus.read(tmp_path, "sdpa")
    assert kept in entries
    assert notes == ()
    assert len(list((tmp_path / "sdpa").iterdir())) == 1


def test_a_campaign_saves_its_finding_and_asks_it_first_of_everybody(tmp_path):
    kept: list = []
    with pytest.raises(Finding, match="again: parity replay "):
        campaign(tmp_path, kept).judge(cell(wrong_window))
    (entry,), _ = corpus.read(tmp_path, "sdpa")
    assert entry.fault == "window-plus-one"
    assert entry.subject == "planted.sdpa.subject"
    assert isinstance(entry.case, SdpaCase)
    assert (entry.case.q_len, entry.case.kv_len <= 3) == (1, True)

    again: list = []
    with pytest.raises(Finding):
        campaign(tmp_path, again).judge(cell(wrong_window))
    assert [record.case_id for record in again] == [entry.case.id]
    mended: list = []
    campaign(tmp_path, mended).judge(cell(RIGHT))
    assert (mended[0].case_id, mended[0].status) == (entry.case.id, Status.AGREE)
    without: list = []
    campaign(tmp_path, without).judge(cell(RIGHT, frozenset({"causal"})))
    assert (without[0].case_id, without[0].status) == (entry.case.id, Status.REFUSED)
    none: list = []
    campaign(None, none).judge(cell(RIGHT))
    assert len(none) == 30 == len(mended) - 1


def test_a_folder_that_cannot_be_written_does_not_hide_the_finding(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Finding, match=r"window-plus-one|window off by one") as found:
        campaign(tmp_path / "file" / "corpus", []).judge(cell(wrong_window))
    assert "not saved: " in str(found.value)
    assert "can't be written" in str(found.value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text[:40], "not an entry of a corpus"),
        (lambda text: text.replace('"kv_len": 2', '"kv_len": 0'), "must be at least 1"),
        (lambda text: text.replace('"kv_len": 2', '"kv_lne": 2'), "is not the JSON of a sdpa case"),
        (lambda text: text.replace('"op": "sdpa"', '"op": "attention"'), "op='attention'"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "update kernel-parity"),
        (lambda text: text.replace('"kv_len": 2', '"kv_len": 3'), "its case is sdpa "),
        (lambda text: text.replace('"found"', '"date"'), "not an entry of a corpus"),
    ],
)
def test_a_file_that_fits_no_more_is_a_sentence(tmp_path, edit, words):
    path = corpus.save(tmp_path, ENTRY)
    path.write_text(edit(path.read_text()))
    entries, (note,) = corpus.read(tmp_path, "sdpa")
    assert entries == ()
    assert words in note
    assert note.startswith(f"{path} is not asked: ")
    assert note.endswith("; mend the file, or remove it")


def test_an_ambiguous_beginning_is_a_sentence(tmp_path):
    for index in range(40):  # 40 ids of 16 possible first digits
        corpus.save(tmp_path, replace(ENTRY, case=replace(CASE, seed=index)))
    first = sorted(path.stem for path in (tmp_path / "sdpa").iterdir())[20][0]
    with pytest.raises(corpus.CorpusError, match="give more digits"):
        corpus.find(tmp_path, first)


def test_the_repository_s_own_entries_fit():
    for op in cases.OPS:
        assert corpus.read(corpus.FOLDER, op)[1] == ()


def test_options_of_a_run(tmp_path):
    """The corpus is asked first, its unreadable files are named, and each part can be left out."""
    folder = tmp_path / "corpus"
    corpus.save(folder, ENTRY)
    (folder / "sdpa" / "torn.json").write_text("{")

    def run(*words: str) -> tuple[list[str], str]:
        runs = tmp_path / f"runs{len(list(tmp_path.iterdir()))}"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_sdpa.py",
             "-k", "torch.sdpa.math", "-m", "cpu", "--engine=torch", "--cases=2",
             f"--runs={runs}", f"--corpus={folder}", *words],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        (records,) = runs.glob("*/records.jsonl")
        lines = records.read_text().splitlines()
        return [json.loads(line)["case_id"] for line in lines], done.stdout

    asked, said = run("--no-pinned")
    assert asked[0] == CASE.id
    assert len(asked) == 3
    assert "note: " in said
    assert "torn.json is not asked" in said
    asked, said = run("--no-corpus", "--no-pinned")
    assert CASE.id not in asked
    assert len(asked) == 2
    assert "torn.json" not in said
