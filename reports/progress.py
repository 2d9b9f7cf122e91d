"""A pytest plugin: a bar that counts finished tests, in place of dots. Used by `parity run`."""

import contextlib
import sys
from collections.abc import Generator
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Status = tuple[str, str, Any]
"""What pytest calls an outcome: category, letter, word."""


class Bar:
    """Follows a session in the controlling process; silent where there is no terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.__stderr__),
            transient=True,
        )
        self._task = self._progress.add_task("collecting", total=None)

    def pytest_sessionstart(self) -> None:
        self._progress.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._total(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        del node
        self._total(len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._progress.advance(self._task)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> Generator[None, Status, Status]:
        """Count everything; print a letter only for what did not pass."""
        category, letter, word = yield
        return (category, "", "") if report.passed else (category, letter, word)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._progress.stop()

    def _total(self, count: int) -> None:
        self._progress.update(self._task, description="cells and tests", total=count)


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    with contextlib.suppress(AttributeError):  # a pythonw-like process has no stderr
        if not worker and sys.__stderr__ is not None and sys.__stderr__.isatty():
            config.pluginmanager.register(Bar(), "parity-bar")
