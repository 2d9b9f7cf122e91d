"""Workers on trial, with real processes: what goes wrong costs one case and says so."""

import dataclasses
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from cases.bmm import BmmCase
from harness import profiles
from harness.environments import client, declared, frames, tensors
from harness.environments.client import Lost, NoWorker, Place, Request, Worker
from harness.environments.source import ROOT
from harness.environments.store import BuildError, Store
from harness.lane import Presence, Tier
from harness.record import Status
from harness.run import Cell
from harness.search import search
from tests import misbehaving

MODULE = "tests.misbehaving"
SECONDS = 5.0
PYTHON = (sys.executable,)


@pytest.fixture(scope="module")
def worker():
    worker = Worker("acme", PYTHON, case_seconds=SECONDS)
    yield worker
    worker.close()


def case(seed: int) -> BmmCase:
    return BmmCase(dtype="float32", seed=seed, values="normal", batch=2, m=3, n=4, k=5)


def request(name: str, seed: int, *, again: bool = False) -> Request:
    return Request(
        op="bmm", module=MODULE, subject=f"acme.bmm.{name}", case=case(seed), device="cpu",
        again=again,
    )  # fmt: skip


def asked(worker: Worker, name: str) -> list[object]:
    """Outcomes of the cases 0 to 5, of which 2 is bad, sent in one message."""
    requests = [request(name, seed) for seed in range(6)]
    worker.plan(requests)
    out = []
    for one in requests:
        try:
            out.append(worker.ask(one).outcome)
        except Lost as error:
            out.append(error)
    return out


def test_answers_are_those_of_this_process(worker):
    got = [worker.ask(request("behaves", seed, again=True)) for seed in range(3)]
    for seed, reply in enumerate(got):
        inputs = case(seed).inputs()
        assert reply.outcome == "answered"
        assert torch.equal(reply.outputs["out"], torch.bmm(inputs["a"], inputs["b"]))
        assert reply.ms > 0


def test_what_an_engine_prints_does_no_harm(worker):
    assert asked(worker, "prints") == ["answered"] * 6


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("raises", "raised", "ZeroDivisionError: division by zero"),
        ("leaves", "raised", "the subject raised SystemExit: 0"),
        ("exits_in_python", "raised", "the subject raised SystemExit: os._exit(3)"),
        ("returns_a_gigabyte", "wrong", "out has shape [268435456], expected [2, 3, 4]"),
    ],
)
def test_a_subject_that_fails_costs_no_worker(worker, name, outcome, words):
    before = worker.starts
    replies = [worker.ask(request(name, seed)) for seed in range(4)]
    assert [reply.outcome for reply in replies] == ["answered", "answered", outcome, "answered"]
    assert words in replies[2].why
    assert worker.starts == max(before, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("killed", "was killed by SIGKILL"),
        ("aborts", "was killed by SIGABRT"),
        ("exits", "ended with exit code 3"),
        ("hangs", f"gave no answer within {SECONDS:g} s; its last words:\nabout to wait"),
        ("garbles", "sent bytes that are no message: b'Segmentation fault"),
        ("cuts", "a message of 1002 bytes ended after 12"),
        ("announces_a_gigabyte", "sent a message of 1024 MiB, expected at most 256 MiB"),
        ("speaks_another_version", f"protocol version {frames.VERSION + 1}, expected"),
    ],
)
def test_a_worker_that_is_lost_costs_its_case_alone(worker, name, words):
    out = asked(worker, name)
    lost = out.pop(2)
    assert out == ["answered"] * 5
    assert isinstance(lost, Lost)
    assert str(lost).startswith("the worker of acme ")
    assert words in str(lost)


def test_a_worker_that_died_between_messages_costs_nothing(worker):
    worker.ask(request("behaves", 1))
    child = worker._child
    child._process.kill()
    child._process.wait()
    assert worker.ask(request("behaves", 2)).outcome == "answered"


def test_a_subject_that_always_loses_its_worker_is_given_up(worker):
    for _ in range(client.DEATHS):
        with pytest.raises(Lost):
            worker.ask(request("exits", 2))
    with pytest.raises(NoWorker, match=r"lost 3 times in a row over acme\.bmm\.exits"):
        worker.ask(request("exits", 2))
    assert worker.ask(request("behaves", 2)).outcome == "answered"


def cell(name: str, command: tuple[str, ...] = PYTHON) -> Cell:
    (subject,) = [s for s in misbehaving.SUBJECTS if s.name == f"acme.bmm.{name}"]
    return Cell(
        op="bmm",
        subject=subject,
        lane="cpu",
        presence=Presence(tier=Tier.HARDWARE, device="cpu"),
        place=Place(environment="acme", command=command, module=MODULE),
    )


def test_a_search_records_what_was_lost_and_judges_the_rest():
    kept = []
    found = search(
        cell("killed"), profiles.load("premerge"), 1, kept.append, examples=12, pinned=False
    )
    lost = [record for record in kept if record.lost]
    assert found in lost
    assert all(misbehaving.bad(BmmCase.from_json(record.case)) for record in lost)
    assert all(record.status is Status.ERROR for record in lost)
    assert {record.status for record in kept if not record.lost} == {Status.AGREE}
    assert len(kept) >= 12


MUTE = "import sys; sys.stdout.buffer.write(b'Welcome to host\\n'); sys.stdout.flush()"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(
            ("/no/such/python",), "/no/such/python: No such file or directory", id="missing"
        ),
        pytest.param(("/etc",), "/etc: Permission denied", id="no-program"),
        pytest.param(
            (sys.executable, "-c", MUTE), "no greeting, but b'Welcome to host", id="says-nothing"
        ),
        pytest.param(
            (sys.executable, "-c", "raise SystemExit('no torch here')"),
            "ended with exit code 1", id="ends-at-once",
        ),
        pytest.param(
            (sys.executable, "-c", "import os; os.write(1, b'\\x89parity\\n\\0\\7' + bytes(12))"),
            "protocol version 7, expected 1", id="older-or-newer",
        ),
    ],
)  # fmt: skip
def test_no_worker_is_one_record_that_says_what_to_do(command, words):
    kept = []
    found = search(cell("behaves", command), profiles.load("premerge"), 0, kept.append, examples=9)
    assert found is not None
    (record,) = [record for record in kept if record.status is not Status.REFUSED]
    assert (record.status, record.lost) == (Status.ERROR, "worker")
    assert words in record.why
    assert "`parity env create acme` makes it anew" in record.why


def test_another_checkout_is_refused(tmp_path):
    for part in ("references", "cases", "harness"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    (tmp_path / "cases" / "newer.py").write_text("")
    there = f"import os, sys; os.chdir({str(tmp_path)!r}); os.environ.pop('PYTHONPATH', None)"
    start = f"{there}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    with pytest.raises(NoWorker, match="runs other files of references, cases or harness"):
        Worker("acme", (sys.executable, "-c", start)).ask(request("behaves", 0))


def test_tensors_keep_their_strides_and_what_lies_between():
    whole = torch.arange(24.0).reshape(4, 6)
    given = {
        "left": whole[:, :3],
        "right": whole[:, 3:],
        "turned": whole.bfloat16().T,
        "broadcast": torch.ones(2, 1).expand(2, 5),
        "empty": torch.empty(0, dtype=torch.int64),
        "one": torch.tensor(True),
    }
    got = tensors.unpack(*tensors.pack(given))
    for name, x in given.items():
        assert (got[name].dtype, got[name].stride()) == (x.dtype, x.stride())
        assert torch.equal(got[name], x)
    assert torch.equal(got["left"].as_strided((4, 6), (6, 1)), whole)


def test_views_that_do_not_fit_their_bytes_are_refused():
    views, body = tensors.pack({"x": torch.ones(3)})
    with pytest.raises(ValueError, match="tensors that can't be read"):
        tensors.unpack({"x": ("0", "float32", 0, [4], [1])}, body)
    with pytest.raises(ValueError, match="tensors that can't be read"):
        tensors.unpack(views, body[:-1])


LIGHT = """
import runpy, sys
from importlib.machinery import PathFinder

LACKING = ("hypothesis", "rich", "typer", "pytest", "transformers", "mlx", "platformdirs")
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name in LACKING else find(name, *more)
sys.argv = sys.argv[2:]
runpy.run_module("harness.environments.worker", run_name="__main__")
"""


def test_a_worker_needs_torch_safetensors_and_this_checkout_alone():
    worker = Worker("acme", (sys.executable, "-c", LIGHT))
    try:
        assert worker.ask(request("behaves", 1)).outcome == "answered"
    finally:
        worker.close()


# Building environments: pip installs nothing here, and the interpreter of this test is as good.


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(cache=tmp_path / "cache", config=tmp_path / "config")


@pytest.fixture
def asked_for_facts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Builds take no time and describe themselves: the commands of those that were asked to."""
    commands = []

    def run(words, **more):
        python = Path(words[-1]) / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        return subprocess.CompletedProcess(words, 0)

    def describe(self, engines):
        commands.append(self.command)
        return {"versions": {"torch": "1"}, "lanes": {}, "host": "here"}

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(Worker, "describe", describe)
    return commands


ACME = declared.Declared(name="acme", engines=("torch",), steps=())


def test_an_interpreter_that_was_named_is_kept(store):
    assert store.find(ACME) is None
    store.name(ACME, PYTHON)
    ready = store.find(ACME)
    assert ready is not None
    assert (ready.command, ready.built) == (PYTHON, False)
    assert ready.facts.versions["torch"] == torch.__version__
    assert ready.facts.lanes["torch"]["cpu"].tier is Tier.HARDWARE
    assert store.remove(ACME, print)
    assert store.find(ACME) is None


def test_an_interpreter_that_lacks_the_engine_is_refused(store):
    other = dataclasses.replace(ACME, engines=("vllm",))
    with pytest.raises(BuildError, match="not installed there: vllm"):
        store.name(other, PYTHON)
    assert store.find(other) is None


def test_a_build_that_fails_says_so_and_is_not_used(store):
    broken = dataclasses.replace(ACME, steps=(("--requirement", "no-such-file.txt"),))
    with pytest.raises(BuildError, match=r"can't be built: .* ended with exit code 1: .*no-such"):
        store.build(broken, ["--no-index"], print)
    assert store.folder(broken).is_dir()
    assert store.find(broken) is None


def test_a_half_built_folder_is_built_anew_and_an_old_lock_removed(store, asked_for_facts):
    half, old = store.folder(ACME), store.cache / "acme-0123456789ab"
    for folder in (half, old):
        folder.mkdir(parents=True)
        (folder / "rest").write_text("of a build that was killed")
    ready = store.build(ACME, [], print)
    assert ready == store.find(ACME)
    assert asked_for_facts == [ready.command]
    assert not (half / "rest").exists()
    assert not old.exists()
    assert store.build(ACME, [], print) == ready
    assert len(asked_for_facts) == 1
    changed = dataclasses.replace(ACME, steps=(("--pre",),))
    assert store.find(changed) is None


def test_two_that_build_at_once_build_once(store, asked_for_facts):
    threads = [threading.Thread(target=store.build, args=(ACME, [], print)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked_for_facts) == 1
    assert store.find(ACME) is not None


def test_facts_of_another_version_are_as_good_as_none(store):
    path = store.config / "acme.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": 999, "command": ["python"], "facts": {}}))
    assert store.find(ACME) is None
    path.write_text("{")
    assert store.find(ACME) is None


@pytest.mark.parametrize(
    "table",
    [
        '[tool.parity.environments.a]\nengines = ["x"]',
        '[tool.parity.environments.a]\nengines = ["x"]\nsteps = []\nstep = 1',
        '[tool.parity.environments]\na = {engines = ["x"], steps = []}\n'
        'b = {engines = ["x"], steps = []}',
    ],
)
def test_a_table_that_means_nothing_is_refused(tmp_path, table):
    path = tmp_path / "pyproject.toml"
    path.write_text(table)
    with pytest.raises(ValueError, match=r"pyproject\.toml"):
        declared.load(path)


def test_every_engine_with_an_environment_names_the_same_packages():
    for one in declared.load().values():
        assert one.engines
        assert all((ROOT / "harness" / "engines" / engine).is_dir() for engine in one.engines)
        assert all((ROOT / word).is_file() for step in one.steps for word in step if "/" in word)
