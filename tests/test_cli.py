"""The command line: bad input is one sentence that names it, and exit code 2."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import cases
from harness.record import Record, Status
from harness.rundir import open_run
from reports import cli
from reports.commands import run as command

ROOT = Path(__file__).parents[1]
RECORD = Record(
    op="sdpa",
    subject="torch.sdpa.math",
    lane="cpu",
    tier="hardware",
    status=Status.AGREE,
    excess=0.5,
    exact=3,
    elements=4,
)


class Parity:
    """Runs `parity` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr(sys, "argv", ["parity", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = self._capsys.readouterr()
        return code, out, err


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Parity:
    return Parity(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "value", "expected"),
    [
        (["run", "--op", "spda"], "op='spda'", "sdpa"),
        (["run", "--engine", "troch"], "engine='troch'", "torch"),
        (["run", "--lane", "gpu"], "lane='gpu'", "cuda"),
        (["run", "--profile", "quick"], "profile='quick'", "premerge"),
        (["run", "--require-lane", "gpu"], "lane='gpu'", "cuda"),
        (["run", "--require-lane", "amx:real"], "tier='real'", "hardware"),
        (["run", "--cases", "0"], "--cases 0", "at least 1"),
        (["run", "--workers", "many"], "--workers 'many'", "auto"),
        (["run", "--op", "sdpa", "--engine", "mlx", "--lane", "cuda"], "lane=cuda", "explain"),
        (["run", "--require-engine", "vlm"], "engine='vlm'", "vllm"),
        (["env", "create", "nowhere"], "environment='nowhere'", "vllm"),
        (["env", "create", "vllm", "--python", "/no/python"], "/no/python", "parity env create"),
        (["env", "create", "vllm", "--python=a", "--command=b"], "--command", "one of them"),
        (["env", "create", "vllm", "--command", "'unclosed"], "--command", "No closing quotation"),
        (["env", "create", "vllm", "--command", ""], "--command ''", "leave it out"),
        (["env", "create", "vllm", "--command", "  "], "--command ''", "leave it out"),
        (["env", "create", "vllm", "--python", ""], "--python ''", "leave it out"),
        (["matrix", "x" * 300], "run='xxx", "expected one of"),
        (["check", f"{'x' * 300}.py:f", "--op", "sdpa"], "xxx.py is no file", "check the path"),
        (["check", f"{'x' * 5000}.py:f", "--op", "sdpa"], "xxx.py", "expected"),
        (["check", "a\0b.py:f", "--op", "sdpa"], "'a\\x00b.py:f' is no path", "FILE.py:FUNCTION"),
        (["check", "f.py:g", "--op", "sdpa", "--lane", ""], "lane=''", "expected one of"),
        (["check", "f.py:g", "--op", "sdpa", "--program", ""], "--program ''", "leave it out"),
        (["replay", "0000", "--subject", ""], "--subject ''", "leave it out"),
        (["replay", "0000", "--lane", ""], "--lane ''", "leave it out"),
        (["replay", "0" * 300, "--corpus", "no"], "case='000", "expected the beginning"),
        (["repro", "0000", "-o", "x.py", "--lane", ""], "--lane ''", "leave it out"),
        (["new", "engine", "tests"], "name='tests'", "lower case"),
        (["new", "engine", "Ω"], "name='Ω'", "lower case"),
        (["env", "remove", "nowhere"], "environment='nowhere'", "vllm"),
        (["explain", "spda"], "op='spda'", "sdpa"),
        (["bench", "--op", "spda"], "op='spda'", "sdpa"),
        (["matrix", "no-such-run"], "run='no-such-run'", "expected one of"),
        (["check", "f.py:g", "--op", "spda"], "op='spda'", "sdpa"),
        (["replay", "0000", "--corpus", "no-such-folder"], "case='0000'", "expected the beginning"),
        (
            ["repro", "0000", "-o", "x.py", "--corpus", "no"],
            "case='0000'",
            "expected the beginning",
        ),
        (["new", "engine", "torch"], "name='torch' is taken", "expected a new one"),
        (["new", "engine", "a-b"], "name='a-b'", "lower case"),
        (["replay", "0000", "--run", "no-such-run"], "run='no-such-run'", "expected one of"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_bad_value_is_one_sentence(
    parity: Parity, words: list[str], value: str, expected: str
) -> None:
    code, out, err = parity(*words)
    assert (code, out) == (2, "")
    assert err.startswith("parity: ")
    assert len(err.splitlines()) == 1
    assert value in err
    assert expected in err


def test_unknown_command_and_option(parity: Parity) -> None:
    assert parity("mtarix")[0] == 2
    assert parity("matrix", "--folder")[0] == 2


def test_unwritable_folder_is_one_sentence(parity: Parity, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = parity("run", "--op", "sdpa", "--runs", str(tmp_path / "file" / "runs"))
    assert code == 2
    assert "can't be written" in err
    assert len(err.splitlines()) == 1


def test_matrix_of_the_latest_run(parity: Parity, tmp_path: Path) -> None:
    writer = open_run(tmp_path)
    writer.append(RECORD)
    folder = writer.finish({})
    code, out, _ = parity("matrix", "--runs", str(tmp_path))
    assert code == 0
    assert "torch.math" in out
    assert out.splitlines()[-1] == str(folder)
    assert parity("matrix", folder.name, "--runs", str(tmp_path))[1] == out
    assert parity("matrix", str(folder))[1] == out
    code, out, _ = parity("matrix", str(folder), "--markdown")
    assert (code, out.count("\n| ")) == (0, 1)


def test_matrix_of_an_unfinished_run_says_so(parity: Parity, tmp_path: Path) -> None:
    writer = open_run(tmp_path)
    writer.append(replace(RECORD, why="x"))
    writer.close()
    with (writer.folder / "records-main.jsonl").open("a") as torn:
        torn.write('{"format": 1, "op"')
    code, out, _ = parity("matrix", str(writer.folder))
    assert code == 0
    assert "This run was not finished" in out
    assert "half-written" in out


def test_no_run_yet(parity: Parity, tmp_path: Path) -> None:
    code, out, err = parity("matrix", "--runs", str(tmp_path))
    assert (code, out) == (2, "")
    assert "start one with `parity run`" in err


def test_corrupt_run(parity: Parity, tmp_path: Path) -> None:
    folder = open_run(tmp_path).finish({})
    (folder / "records.jsonl").write_text("{}\n")
    code, _, err = parity("matrix", str(folder))
    assert code == 2
    assert "records.jsonl, line 1" in err


def test_lanes_names_every_lane_and_reason(parity: Parity) -> None:
    code, out, _ = parity("lanes")
    assert code == 0
    for lane in ("cpu", "amx", "mps", "cuda"):
        assert lane in out


def test_explain_has_contract_features_and_subjects(parity: Parity) -> None:
    code, out, _ = parity("explain", "sdpa")
    assert code == 0
    for part in ("**Contract**", "softcap", "lse    float32", "torch.sdpa.math", "gpt-oss-decode"):
        assert part in out


def test_run_passes_on_what_was_asked(parity: Parity, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fake(words: list[str], runs: Path) -> int:
        del runs
        asked.append(words)
        return 5

    monkeypatch.setattr(command, "_code", fake)
    words = ("--op", "sdpa", "--engine", "torch", "--lane", "cpu", "--lane", "cuda")
    more = ("--profile", "nightly", "--cases", "7", "--seed", "3", "--require-lane", "cuda")
    assert parity("run", *words, *more, "--workers", "1")[0] == 5
    (said,) = asked
    assert said[3] == "tests/test_sdpa.py"
    for word in ("--engine=torch", "cpu or cuda", "--profile=nightly", "--cases=7", "--seed=3",
                 "--require-lane=cuda"):  # fmt: skip
        assert word in said
    assert "-n" not in said


def test_run_judges_and_shows_the_matrix_and_the_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "reports.cli", "run", "--op", "banded_mask"),
            *("--engine", "native", "--cases", "5", "--workers", "1", "--runs", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    assert str(folder) in done.stdout
    assert "native.banded_mask" in done.stdout
    assert (folder / "run.json").is_file()


def test_replay_finds_a_case_of_the_latest_run(parity: Parity, tmp_path: Path) -> None:
    case = cases.load("banded_mask").PINNED[0][1]
    writer = open_run(tmp_path)
    for subject in ("native.banded_mask.torch", "native.banded_mask.mlx"):
        writer.append(
            replace(
                RECORD, op="banded_mask", subject=subject, case=case.to_json(), case_id=case.id,
                status=Status.DISAGREE if subject.endswith("torch") else Status.AGREE,
            )
        )  # fmt: skip
    writer.finish({})
    words = ("--runs", str(tmp_path), "--corpus", str(tmp_path / "corpus"))
    code, out, _ = parity("replay", case.id[:5], *words)
    assert code == 0
    assert out.startswith("native.banded_mask.torch@cpu (hardware): agree")
    for more, said in (
        (("--subject", "native.banded_mask.trch"), "expected one of "),
        (("--lane", "amx"), "lane='amx' is none of native.banded_mask.torch"),
        (("--subject", "mlx_lm.banded_mask.rotating"), "refuses case"),
    ):
        code, out, err = parity("replay", case.id, *words, *more)
        assert (code, out) == (2, "")
        assert said in err


def test_replay_while_the_only_run_goes_on_names_the_case(parity: Parity, tmp_path: Path) -> None:
    going_on = open_run(tmp_path)
    words = ("--runs", str(tmp_path), "--corpus", str(tmp_path / "corpus"))
    code, out, err = parity("replay", "0000", *words)
    going_on.close()
    assert (code, out) == (2, "")
    assert "case='0000' is neither in " in err
