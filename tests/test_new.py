"""`parity new engine` on trial: what it writes is linted, typed, and judged green at once."""

import subprocess
import sys
from pathlib import Path

import pytest

import cases
from harness import engines
from reports import newengine
from tests.test_layout import tree  # noqa: F401 - the fixture

RUN = (sys.executable, "-m")


def run(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a module run in `folder`, which has packages of its own."""
    done = subprocess.run(
        [*RUN, *words], cwd=folder, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_every_op_has_one():
    assert newengine.OPS == cases.OPS


def test_a_new_engine_of_each_op_is_clean_and_green_at_once(tree):  # noqa: F811
    names = {op: f"acme_{index}" for index, op in enumerate(cases.OPS)}
    folder = tree / "harness" / "engines"
    for op, name in names.items():
        files = newengine.write(name, op, folder)
        assert [file.name for file in files] == ["__init__.py", f"{op}.py"]
    for words in (("ruff", "check"), ("ruff", "format", "--check")):
        code, said = run(tree, *words, *(str(folder / name) for name in names.values()))
        assert code == 0, said
    words = [f"--engine={name}" for name in names.values()]
    files = [f"tests/test_{op}.py" for op in (*names, "layout")]
    asked = "agrees_with_reference or every_engine or claims or well_formed"
    code, said = run(
        tree, "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", asked, *words,
        "--cases=30", f"--runs={tree / 'runs'}",
    )  # fmt: skip
    assert code == 0, said
    for name in names.values():
        assert f"{name}." in said


def test_the_command_writes_a_folder(tree):  # noqa: F811
    code, said = run(tree, "reports.cli", "new", "engine", "flash_attn")
    assert code == 0, said
    assert (tree / "harness" / "engines" / "flash_attn" / "sdpa.py").is_file()
    assert "parity run --engine flash_attn" in said


@pytest.mark.parametrize(
    "name",
    [
        "flash-attn",
        "Flash",
        "class",
        "_mine",
        "1st",
        "",
        "a/b",
        "tests",
        "cases",
        "harness",
        "Ω",
        "ﬁ",
        "a²",
        "a\n",
    ],
)
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="expected the package's Python name in lower case"):
        newengine.write(name, "sdpa", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", engines.NAMES)
def test_a_taken_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is taken by"):
        newengine.write(name, "sdpa", tmp_path)
    assert list(tmp_path.iterdir()) == []
