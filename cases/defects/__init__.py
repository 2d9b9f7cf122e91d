"""Planted wrong versions of each op, named after real bugs: `cases/defects/<op>.py` has DEFECTS.

A defect answers another question than the one that was asked, by the reference.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cases.case import Case, Inputs

OPS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))

Question = tuple[Any, Inputs]


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A wrong version of an op.

    name: short, unique within the op. bugs: ids of the real bugs that it stands for.
    sentence: what a finding says, e.g. "window off by one: W+1 keys visible".
    question: the case and inputs that the faulty code answers instead, or None where the fault
        can't show (the feature is off).
    answer_of: what becomes of that answer (e.g. heads in another order); the answer itself if None.
    """

    name: str
    bugs: tuple[str, ...]
    sentence: str
    question: Callable[[Any, Inputs], Question | None]
    answer_of: Callable[[Any, Inputs], Inputs] | None = None

    def answer(self, case: Case, inputs: Inputs) -> Inputs | None:
        """The faulty answer in float64, or None where the fault can't show."""
        asked = self.question(case, inputs)
        if asked is None:
            return None
        other, changed = asked
        out = other.expected(changed)
        return out if self.answer_of is None else self.answer_of(case, out)


def load(op: str) -> tuple[Defect, ...]:
    """The op's fault dictionary; empty when it has none."""
    return importlib.import_module(f"cases.defects.{op}").DEFECTS if op in OPS else ()
