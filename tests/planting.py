"""What it is to plant a bug into an engine from outside; read in the engine's worker too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cases
from cases.case import Case
from harness import engines
from harness.record import Record
from harness.subject import Subject, Tensors

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A bug: which subject must show it, and which names it has in the fault dictionary.

    telling: a case that leaves no doubt which of the faults it is; a smallest one may.
    reading: what a probe says of it, where the dictionary has no name for it.
    """

    name: str
    subject: str
    faults: tuple[str, ...]
    telling: Case
    patch: Patch
    reading: str = ""

    @property
    def engine(self) -> str:
        return self.subject.split(".")[0]

    @property
    def op(self) -> str:
        return self.subject.split(".")[1]

    def planted(self) -> Subject:
        """The ordinary subject, with a part of its engine replaced while it answers."""
        (right,) = [s for s in engines.subjects(self.engine, self.op) if s.name == self.subject]

        def run(case: Any, tensors: Tensors) -> Tensors:
            with self.patch():
                return right.run(case, tensors)

        return replace(right, name=f"{self.subject} + {self.name}", run=run)


def case_of(record: Record) -> Any:
    return cases.load(record.op).CASE.from_json(record.case)
