"""Pytest wiring: which cells a run has, what it keeps, and whether it may be believed."""

import os
import secrets
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from harness import corpus, engines, garbage, gate, lane, machine, profiles, rundir
from harness.campaign import Absent, Campaign
from harness.cells import cells
from harness.engines import EngineError
from harness.record import BAD, Record
from harness.run import Cell
from reports import matrix

ROOT = Path(__file__).resolve().parent
RUNS = ROOT / "reports" / "out" / "runs"

# Tests ask the same every time, and none fails because the machine was busy.
settings.register_profile("parity", deadline=None, derandomize=True, database=None)
settings.load_profile("parity")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption("--profile", default="premerge", help="premerge, nightly or fuzz")
    group.addoption("--cases", type=int, help="cases drawn per cell")
    group.addoption("--seed", type=int, help="of what is drawn (nightly draws one and prints it)")
    group.addoption("--engine", action="append", help="only this engine (repeatable)")
    group.addoption(
        "--require-lane",
        action="append",
        default=[],
        help="fail if this lane, or lane:tier, judged too little (repeatable; cpu is required)",
    )
    group.addoption(
        "--require-engine",
        action="append",
        default=[],
        help="fail if this engine judged too little, e.g. for want of its environment (repeatable)",
    )
    group.addoption("--runs", type=Path, default=RUNS, help="folder that takes the run's folder")
    group.addoption("--no-pinned", action="store_true", help="do not ask the pinned cases")
    group.addoption("--no-corpus", action="store_true", help="neither ask nor keep old findings")
    group.addoption(
        "--corpus", type=Path, default=corpus.FOLDER, help="folder of findings, asked first"
    )


class Session:
    """The run that this process takes part in: its folder, its campaign, its records."""

    def __init__(self, config: pytest.Config) -> None:
        self.start = time.monotonic()
        self.worker = getattr(config, "workerinput", None)
        self.required: list[str] = config.option.require_lane
        self.engines: list[str] = config.option.require_engine
        try:
            profile = profiles.load(config.option.profile)
            for text in self.required:
                gate.requirement(text)
            for engine in self.engines:
                engines.ops(engine)
        except (ValueError, EngineError) as error:
            raise pytest.UsageError(str(error)) from error
        seeds = ((self.worker or {}).get("seed"), config.option.seed, profile.seed)
        seed = next((s for s in seeds if s is not None), secrets.randbits(32))
        self.runs: Path = config.option.runs
        self.writer: rundir.RunWriter | None = None
        self.seen: list[Record] = []
        self.cells: list[gate.CellName] = []
        self.campaign = Campaign(
            profile=profile,
            seed=seed,
            keep=self.keep,
            examples=config.option.cases,
            pinned=not config.option.no_pinned,
            corpus=None if config.option.no_corpus else config.option.corpus,
        )

    def open(self) -> rundir.RunWriter:
        if self.writer is None:
            if self.worker:
                self.writer = rundir.attach(Path(self.worker["run"]), self.worker["workerid"])
            else:
                self.writer = rundir.open_run(self.runs, {**machine.describe(ROOT), **self.info()})
        return self.writer

    def info(self) -> dict[str, Any]:
        return {
            "profile": self.campaign.profile.name,
            "seed": self.campaign.seed,
            "cases": self.campaign.examples,
            "command": sys.argv[1:],
            "pid": os.getpid(),
        }

    def keep(self, record: Record) -> None:
        self.open().append(record)
        self.seen.append(record)


SESSION = pytest.StashKey[Session]()
FOUND = pytest.StashKey[tuple[list[str], list[Record], Path]]()


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # two workers on two cores; and one order of summation
    config.stash[SESSION] = Session(config)


def pytest_configure_node(node: Any) -> None:
    """xdist: every worker writes into the controller's run, from the controller's seed."""
    session = node.config.stash[SESSION]
    try:
        node.workerinput["run"] = str(session.open().folder)
    except rundir.RunError as error:
        raise pytest.UsageError(str(error)) from error
    node.workerinput["seed"] = session.campaign.seed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test taking a `cell` runs once per subject and lane of the op its file is named after."""
    if "cell" not in metafunc.fixturenames:
        return
    op = metafunc.definition.path.stem.removeprefix("test_")
    try:
        found = cells([op], metafunc.config.option.engine)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    except EngineError as error:  # a failing test, so that every worker and the summary tell
        metafunc.parametrize("cell", [pytest.param(error, id="broken-engine")])
        return
    params = [
        pytest.param(cell, id=cell.name, marks=getattr(pytest.mark, cell.lane)) for cell in found
    ]
    metafunc.parametrize("cell", params)


@pytest.fixture(scope="session")
def campaign(request: pytest.FixtureRequest) -> Campaign:
    return request.config.stash[SESSION].campaign


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A cell that can't run here neither passes nor fails: it is absent, and says why."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(Absent):
        why = str(call.excinfo.value)
        report.user_properties.append(("absent", why))
        if report.when == "call":
            report.outcome, report.longrepr = "passed", None
        else:  # of a fixture: pytest would go on to call the test without it
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {why}")
    elif report.skipped and "cell" in getattr(item, "fixturenames", ()):  # or xfailed
        why = str(call.excinfo.value) if call.excinfo is not None else "no reason given"
        report.outcome = "failed"
        report.longrepr = (
            f"{item.name} was skipped ({why}): only a cell that is absent here is not judged"
        )
        vars(report).pop("wasxfail", None)
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> Any:
    told = report.when == "call" or (report.when == "setup" and report.skipped)
    if told and any(name == "absent" for name, _ in report.user_properties):
        return "absent", "a", ("ABSENT", {"yellow": True})
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember which cells are to be asked: those that no option left out."""
    garbage.settle()
    mine = session.config.stash[SESSION]
    specs = [getattr(item, "callspec", None) for item in session.items]
    mine.cells = [
        (cell.op, cell.subject.name, cell.lane)
        for cell in (spec.params.get("cell") for spec in specs if spec is not None)
        if isinstance(cell, Cell)
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """xdist: a worker's cells; each worker collects them all, the controller none."""
    told = getattr(node, "workeroutput", {}).get("cells", ())
    node.config.stash[SESSION].cells += [tuple(cell) for cell in told]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Close the run and let the gate decide whether it may be believed."""
    config = session.config
    mine = config.stash[SESSION]
    if mine.worker:
        if mine.writer is not None:
            mine.writer.close()
        config.workeroutput["cells"] = mine.cells  # pyright: ignore[reportAttributeAccessIssue]
        return
    to_be_asked = _to_be_asked(session)
    asked_for = [*mine.required, *mine.engines, *to_be_asked]
    if mine.writer is None and not asked_for:
        return
    elapsed = round(time.monotonic() - mine.start, 1)
    folder = mine.open().finish({"duration_s": elapsed, "exit": int(session.exitstatus)})
    _, records = rundir.read_run(folder)
    if not records and not asked_for:  # a run of tests that judge no cell
        rundir.discard(folder)
        return
    required = mine.required
    if any(record.lane in lane.REQUIRED for record in records):
        required = [*required, *lane.REQUIRED]
    least = mine.campaign.least
    wrong = {record.cell for record in records if record.status in BAD}
    slow = {cell.name for cell in cells() if cell.subject.slow} if mine.campaign.slow else set()
    minimums = {
        record.cell: 1
        for record in records
        if record.cell in wrong or f"{record.subject}@{record.lane}" in slow
    }
    found = gate.findings(
        records,
        required=dict.fromkeys(required),
        engines=dict.fromkeys(mine.engines),
        cells=dict.fromkeys(to_be_asked),
        minimum=least,
        minimums=minimums,
        lane_minimum=least,
        vacuous_cap=mine.campaign.profile.vacuous,
    )
    config.stash[FOUND] = (found, records, folder)
    session.exitstatus = session.exitstatus or int(bool(found))


def _to_be_asked(session: pytest.Session) -> list[gate.CellName]:
    """The cells of the session; none of one that broke off, which is told already."""
    broke_off = session.shouldstop or session.shouldfail or session.config.option.collectonly
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if broke_off or session.exitstatus not in ended:
        return []
    return session.config.stash[SESSION].cells


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if FOUND not in config.stash:
        return
    found, records, folder = config.stash[FOUND]
    campaign = config.stash[SESSION].campaign
    writer = terminalreporter
    writer.section("matrix")
    writer.write(matrix.text(records, colour=writer.hasmarkup))
    writer.write_line(f"profile {campaign.profile.name}, --seed {campaign.seed}")
    for line in found:
        writer.write_line(f"finding: {line}", red=True)
    for note in _unread(campaign, records):
        writer.write_line(f"note: {note}", yellow=True)
    writer.write_line(f"run: {folder}")


def _unread(campaign: Campaign, records: list[Record]) -> list[str]:
    """A sentence for each file of the corpus that could not be asked, of the ops of this run."""
    if campaign.corpus is None:
        return []
    ops = sorted({record.op for record in records})
    return [note for op in ops for note in corpus.read(campaign.corpus, op)[1]]
