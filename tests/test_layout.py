"""The tree is the registry: same name, same op; one folder, one engine; and it says so if not."""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import cases
from cases import defects
from harness import engines, lane, runtimes
from harness.subject import Subject

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize(
    "place",
    [
        "references/{}.py",
        "references/hf/{}.py",
        "cases/{}.py",
        "cases/defects/{}.py",
        "cases/probes/{}.py",
        "harness/programs/{}.py",
        "harness/signatures/{}.py",
        "tests/test_{}.py",
    ],
)
def test_every_op_has_a_file_of_its_name(op: str, place: str) -> None:
    assert (ROOT / place.format(op)).is_file()


@pytest.mark.parametrize("op", cases.OPS)
def test_every_op_offers_what_the_harness_asks_of_it(op: str) -> None:
    module = cases.load(op)
    assert module.CASE.op == op
    assert module.PINNED
    assert all(isinstance(case, module.CASE) for _, case in module.PINNED)
    assert set(module.FEATURES) == {f.name for f in fields(module.CASE) if f.default is not MISSING}
    assert all(module.FEATURES.values())
    assert callable(importlib.import_module(f"harness.programs.{op}").envelope)
    assert len({defect.name for defect in defects.load(op)}) == len(defects.load(op)) > 0


@pytest.mark.parametrize("op", cases.OPS)
def test_every_reference_states_a_contract(op: str) -> None:
    module = importlib.import_module(f"references.{op}")
    meaning = [module, *(f for f in vars(module).values() if inspect.isfunction(f))]
    assert any("**Contract**" in (part.__doc__ or "") for part in meaning)


@pytest.mark.parametrize("engine", engines.NAMES)
def test_every_engine_file_is_named_after_an_op(engine: str) -> None:
    assert set(engines.ops(engine)) <= set(cases.OPS)
    assert engines.ops(engine)


@pytest.mark.parametrize("engine", engines.NAMES)
def test_every_engine_says_what_it_requires(engine: str) -> None:
    requires = importlib.import_module(f"harness.engines.{engine}").REQUIRES
    assert isinstance(requires, tuple)
    assert all(isinstance(name, str) for name in requires)


def test_subjects_are_well_formed() -> None:
    names = [subject.name for subject in _subjects()]
    assert len(set(names)) == len(names)
    for subject in _subjects():
        assert subject.runtime in runtimes.NAMES
        assert subject.lanes
        assert set(subject.lanes) <= set(lane.NAMES)
        assert subject.dtypes


@pytest.mark.parametrize("engine", engines.NAMES)
def test_claims_are_features(engine: str) -> None:
    for op in engines.ops(engine):
        for subject in engines.subjects(engine, op):
            claims = {claim.removeprefix("always ") for claim in subject.claims}
            assert claims <= set(cases.load(op).FEATURES)


def test_every_lane_is_a_marker(pytestconfig: pytest.Config) -> None:
    markers = [line.split(":")[0] for line in pytestconfig.getini("markers")]
    assert set(lane.NAMES) <= set(markers)


def _subjects() -> list[Subject]:
    return [
        subject
        for engine in engines.NAMES
        for op in engines.ops(engine)
        for subject in engines.subjects(engine, op)
    ]


# What follows runs pytest on a copy of the tree to which something was done.

HEAD = '''"""Masks of another engine."""

import torch

from harness.subject import Subject


def right(case, tensors):
    return {"visible": case.expected(case.inputs())["visible"].bool()}


def subject(name, run, refusal=lambda case: None):
    return Subject(name=name, run=run, claims=frozenset(), dtypes=("bool",), refusal=refusal)


'''
GOOD = HEAD + 'SUBJECTS = (subject("acme.banded_mask.plain", right),)\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the checkout, in a folder with a space in its name."""
    copy = tmp_path / "a copy"
    for name in ("references", "cases", "harness", "reports", "tests"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "out")
        )
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def _engine(tree: Path, op: str, text: str, init: str = "REQUIRES = ()\n") -> None:
    folder = tree / "harness" / "engines" / "acme"
    folder.mkdir()
    (folder / "__init__.py").write_text(f'"""Acme."""\n\n{init}')
    (folder / f"{op}.py").write_text(text)


def _pytest(tree: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a small run of the banded masks of `acme`."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("tests/test_banded_mask.py", "-k", "agrees_with_reference or broken"),
            *("--cases=5", f"--runs={tree / 'runs'}", *(words or ("--engine=acme",))),
        ],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_new_engine_needs_one_folder_and_no_other_edit(tree: Path) -> None:
    _engine(tree, "banded_mask", GOOD)
    code, said = _pytest(tree)
    assert "acme.plain" in said
    assert code == 0, said


def test_misspelled_engine_file_fails_with_a_sentence(tree: Path) -> None:
    _engine(tree, "banded_msak", GOOD)
    code, said = _pytest(tree)
    assert code != 0
    assert "banded_msak" in said
    assert "banded_mask" in said


def test_adapter_that_cannot_be_imported_fails_with_a_sentence(tree: Path) -> None:
    _engine(tree, "banded_mask", "import torch.no_such_module\n")
    code, said = _pytest(tree)
    assert code != 0
    assert "harness/engines/acme/banded_mask.py can't be imported: ModuleNotFoundError" in said


def test_adapter_that_skips_itself_fails_with_a_sentence(tree: Path) -> None:
    """A skip at import would leave out the whole op, and pass."""
    _engine(tree, "banded_mask", 'import pytest\n\npytest.importorskip("no_such_package")\n')
    code, said = _pytest(tree)
    assert code == 1
    assert "harness/engines/acme/banded_mask.py can't be imported: Skipped" in said


@pytest.mark.parametrize("how", ["skip", "xfail"])
def test_a_cell_that_is_skipped_fails_with_a_sentence(tree: Path, how: str) -> None:
    _engine(tree, "banded_mask", GOOD)
    test = tree / "tests" / "test_banded_mask.py"
    test.write_text(
        f"import pytest\n\n\ndef test_agrees_with_reference(cell):\n    pytest.{how}('not now')\n"
    )
    code, said = _pytest(tree)
    assert code == 1, said
    assert "was skipped (not now): only a cell that is absent here is not judged" in said


NO_RECORD = "no record: the cell was to be asked and was not"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_cell_that_is_not_asked_is_a_finding(tree: Path, workers: str) -> None:
    one, other = (f'subject("acme.banded_mask.{name}", right)' for name in ("one", "other"))
    _engine(tree, "banded_mask", f"{HEAD}SUBJECTS = ({one}, {other})\n")
    test = tree / "tests" / "test_banded_mask.py"
    test.write_text(
        "def test_agrees_with_reference(cell, campaign):\n"
        "    if cell.subject.name.endswith('one'):\n        campaign.judge(cell)\n"
    )
    code, said = _pytest(tree, "--engine=acme", "-n", workers)
    assert code == 1, said
    found = [line for line in said.splitlines() if line.startswith("finding: ")]
    assert found == [f"finding: acme.banded_mask.other@cpu: {NO_RECORD}"]
    code, said = _pytest(tree, "--engine=acme", "-n", workers, "-k", "one")
    assert code == 0, said
    test.write_text("def test_agrees_with_reference(cell):\n    pass\n")
    code, said = _pytest(tree, "--engine=acme", "-n", workers)
    assert code == 1, said
    assert "finding: nothing was judged" in said


@pytest.mark.parametrize("workers", ["0", "1"])
def test_of_a_run_that_broke_off_no_cell_is_missed(tree: Path, workers: str) -> None:
    wrong, right = (
        'subject("acme.banded_mask.a", lambda case, tensors: {})',
        'subject("acme.banded_mask.b", right)',
    )
    _engine(tree, "banded_mask", f"{HEAD}SUBJECTS = ({wrong}, {right})\n")
    code, said = _pytest(tree, "--engine=acme", "-n", workers, "-x")
    assert code != 0
    assert NO_RECORD not in said
    assert "finding: acme.banded_mask.a@cpu: disagree" in said


def test_a_subject_that_ends_the_process_does_not_pass(tree: Path) -> None:
    leave = '__import__("ctypes").CDLL(None)._exit(0)'  # as C code does, past Python's os._exit
    ends = f'subject("acme.banded_mask.ends", lambda case, tensors: {leave})'
    _engine(tree, "banded_mask", f"{HEAD}SUBJECTS = ({ends},)\n")
    words = ("run", "--op=banded_mask", "--engine=acme", "--cases=5", f"--runs={tree / 'runs'}")
    for workers, said in (
        ("1", "exit code 0 before it was finished"),
        ("2", "acme.banded_mask.ends"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "reports.cli", *words, "--workers", workers, "--no-corpus"],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stdout + done.stderr
        assert said in done.stdout + done.stderr


def test_adapter_without_subjects_fails_with_a_sentence(tree: Path) -> None:
    _engine(tree, "banded_mask", "SUBJECTS = ()\n")
    code, said = _pytest(tree)
    assert code != 0
    assert "must offer SUBJECTS, a tuple of at least one Subject" in said


def test_no_framework_at_all_fails_with_a_sentence(tree: Path) -> None:
    for engine in engines.NAMES:
        shutil.rmtree(tree / "harness" / "engines" / engine)
    _engine(tree, "banded_mask", GOOD, 'REQUIRES = ("no_such_package",)\nLANES = ("cpu",)\n')
    code, said = _pytest(tree)
    assert code == 1, said
    assert "finding: --require-lane cpu: absent: not installed: no_such_package" in said


BROKEN = {
    "raises": ("1 / 0", "ZeroDivisionError"),
    "skips": ('__import__("pytest").skip("not today")', "the subject raised Skipped: not today"),
    "xfails": ('__import__("pytest").xfail("known")', "the subject raised XFailed: known"),
    "leaves": ('__import__("sys").exit(0)', "the subject raised SystemExit: 0"),
    "nothing": ("None", "the subject returned NoneType, expected a dict of visible"),
    "lacking": ("{}", "output visible is missing"),
    "shape": ('{"visible": torch.ones(1, 2, dtype=torch.bool)}', "has shape [1, 2], expected"),
    "dtype": ('{"visible": torch.ones(case.output_shapes()["visible"])}', "has dtype float32"),
    "empty": ('{"visible": torch.ones(0, dtype=torch.bool)}', "has shape [0], expected"),
}


def test_broken_subjects_fail_with_a_sentence_each(tree: Path) -> None:
    lines = [
        f'    subject("acme.banded_mask.{name}", lambda case, tensors: {answer}),\n'
        for name, (answer, _) in BROKEN.items()
    ]
    refusing = '    subject("acme.banded_mask.refuses", right, lambda case: "not today"),\n'
    _engine(tree, "banded_mask", f"{HEAD}SUBJECTS = (\n{''.join(lines)}{refusing})\n")
    code, said = _pytest(tree)
    assert code == 1
    found = [line for line in said.splitlines() if line.startswith("finding: ")]
    for name, (_, sentence) in BROKEN.items():
        (finding,) = [line for line in found if f"acme.banded_mask.{name}@cpu" in line]
        assert sentence in finding
    (finding,) = [line for line in found if "acme.banded_mask.refuses@cpu" in line]
    assert "refused all" in finding
