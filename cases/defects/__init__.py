"""Planted wrong versions of each op, named after real bugs: `cases/defects/<op>.py` has DEFECTS,
most of which are the fault dictionary, LASTING where state may survive a call, and MISREAD where
a config is translated.

A defect answers another question than the one that was asked, by the reference. `bugs.toml` lists
the real bugs, with the reason for each that can't be planted.
"""

import importlib
import pkgutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cases.case import Case, Inputs

OPS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_"))

Question = tuple[Any, Inputs]
Ask = Callable[[Any, Inputs], Question | None]


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A wrong version of an op.

    name: short, unique within the op. bugs: ids of the real bugs that it stands for.
    sentence: what a finding says, e.g. "window off by one: W+1 keys visible".
    question: the case and inputs that the faulty code answers instead, or None where the fault
        can't show (the feature is off).
    answer_of: what becomes of that answer (e.g. heads in another order); the answer itself if None.
    rounding: it rounds otherwise than a right kernel, and computes the same: the dtypes alone may
        allow that, so only a kernel of declared arithmetic can be told that it is wrong.
    listed: it stands in the fault dictionary. One that answers NaN has no direction to look for,
        and one within the rounding errors of a right kernel is drift, whatever its cause.
    """

    name: str
    bugs: tuple[str, ...]
    sentence: str
    question: Ask
    answer_of: Callable[[Any, Inputs], Inputs] | None = None
    rounding: bool = False
    listed: bool = True

    def answer(self, case: Case, inputs: Inputs) -> Inputs | None:
        """The faulty answer in float64, or None where the fault can't show."""
        asked = self.question(case, inputs)
        if asked is None:
            return None
        other, changed = asked
        out = other.expected(changed)
        return out if self.answer_of is None else self.answer_of(case, out)


@dataclass(frozen=True, kw_only=True)
class Lasting:
    """A wrong version that remembers: what it answers depends on the calls before.

    begin: the `question` of a kernel that nobody has called yet. The calls that follow, in order,
        are all that it knows of the past.
    """

    name: str
    bugs: tuple[str, ...]
    sentence: str
    begin: Callable[[], Ask]

    def start(self) -> Defect:
        """A kernel of its own, with nothing to remember."""
        return Defect(name=self.name, bugs=self.bugs, sentence=self.sentence, question=self.begin())


@dataclass(frozen=True, kw_only=True)
class Misread:
    """A wrong reading of a model's config.json: `reads` is the config that a right reader of what
    the wrong one has looked at would be given.

    It is planted into a translator of configs, not into the reference.
    """

    name: str
    bugs: tuple[str, ...]
    sentence: str
    reads: Callable[[dict[str, Any]], dict[str, Any]]


Fault = Defect | Lasting | Misread


def load(op: str) -> tuple[Defect, ...]:
    """The op's fault dictionary; empty when it has none."""
    return tuple(fault for fault in planted(op) if isinstance(fault, Defect) and fault.listed)


@cache
def planted(op: str) -> tuple[Fault, ...]:
    """Every wrong version of the op: the dictionary, and what can't be looked for in an answer."""
    if op not in OPS:
        return ()
    module = importlib.import_module(f"cases.defects.{op}")
    return (*module.DEFECTS, *getattr(module, "LASTING", ()), *getattr(module, "MISREAD", ()))


@cache
def bugs() -> Mapping[str, Mapping[str, str]]:
    """The real bugs by id: `ref`, the public thread, and `unplanted`, why it can't be planted."""
    return tomllib.loads((Path(__file__).parent / "bugs.toml").read_text(encoding="utf-8"))
