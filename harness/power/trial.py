"""Every defect put to the same questions, and judged by the ordinary path.

Cases are drawn once, and what the program, the envelope and the fault dictionary say of a case is
computed once. Sending, calling, the contract, the comparison and the naming are those of
`harness.run.ask`, for each wrong kernel anew. Nothing is shrunk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cases import defects
from cases.case import Case, Inputs
from cases.defects import Defect, Fault, Lasting, Misread
from harness import programs
from harness.engines.native import yarn as native_yarn
from harness.engines.native.torch.yarn import RopeError
from harness.power import planted
from harness.power.correct import about
from harness.power.once import Once, answered
from harness.power.questions import Question
from harness.power.rules import RULES
from harness.record import BAD, Record
from harness.run import Cell, ask
from harness.subject import Program, Tensors


@dataclass(kw_only=True)
class Tally:
    """What became of one defect in one dtype.

    listed: it stands in the fault dictionary. rounding: it only rounds otherwise.
    drawn: cases that the generator gave. shown: those of them in which the faulty kernel's judged
        elements are not all those of the right one. killed: those that failed the ordinary path;
        first: the number of the first of them, from 1.
    given_shown, given_killed: the same of pinned cases and old findings.
    named: kills with a named fault; right: named as the planted one, or as an entry of the
        dictionary that gives the same bits in that case; exactly: as the planted one itself.
    rules: of the drawn cases that show the fault, how many answers each other rule would reject.
    """

    op: str
    defect: str
    dtype: str
    held_to: str
    bugs: tuple[str, ...]
    listed: bool
    rounding: bool
    drawn: int = 0
    shown: int = 0
    killed: int = 0
    first: int | None = None
    given_shown: int = 0
    given_killed: int = 0
    named: int = 0
    right: int = 0
    exactly: int = 0
    rules: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))

    @property
    def equivalent(self) -> bool:
        """No question has shown the fault: there was nothing to catch."""
        return not self.shown and not self.given_shown

    @property
    def kills(self) -> int:
        return self.killed + self.given_killed

    @property
    def caught(self) -> bool:
        return self.kills > 0


class Trial:
    """One op's defects in one dtype, behind subjects of the ordinary interface.

    program: the arithmetic of the planted kernels, which they are held to. Without one they give
        the reference's answers, rounded once, and are held to the envelope: what a person's own
        kernel gets.
    faults: what is planted; by default all that is known of the op.
    named: whether what is wrong is explained by the dictionary. rules: whether other harnesses'
        rules are asked too. again: whether a kernel that was caught is asked on.
    keep: takes every record of a fault that shows.
    """

    def __init__(
        self,
        op: str,
        dtype: str,
        *,
        program: Program | None = None,
        faults: Sequence[Fault] | None = None,
        named: bool = True,
        rules: bool = True,
        again: bool = True,
        keep: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self.op, self.dtype, self._keep = op, dtype, keep
        self._named, self._rules, self._again = named, rules, again
        self._bound = Once(programs.envelope(op))
        self._program = None if program is None else Once(program)
        self._right = Once(self._rightly)
        self._dictionary = {d.name: answered(d) for d in defects.load(op)}
        self._kernels = [
            _Kernel(self, self._dictionary.get(fault.name, fault))
            for fault in (defects.planted(op) if faults is None else faults)
        ]

    @property
    def tallies(self) -> list[Tally]:
        return [kernel.tally for kernel in self._kernels]

    def put(self, question: Question) -> None:
        """Put the question to every kernel."""
        case = question.case
        inputs = case.inputs()
        vacuous = case.vacuous(inputs) is not None
        answers = None
        for kernel in self._kernels:
            tally = kernel.tally
            tally.drawn += question.drawn
            if vacuous or (tally.caught and not self._again):
                continue
            record = kernel.put(case, inputs)
            if record is None:
                continue
            self._keep(record)
            _count(tally, question, record)
            if record.fault:
                tally.right += self._same(record.fault, tally.defect, case, inputs)
            if question.drawn and self._rules:
                answers = answers or about(self.op, case, inputs)
                for name, rule in RULES.items():
                    tally.rules[name] += not answers.passes(rule, kernel.said)

    def answer(self, defect: Defect, case: Case, inputs: Inputs) -> Tensors | None:
        """What a kernel with this defect says, or None where the defect can't show."""
        if self._program is not None:
            return planted.faulty(self._program, defect, case, inputs)
        return planted.staged(case, inputs, lambda given: defect.answer(case, given))

    def right(self, case: Case, inputs: Inputs) -> Tensors:
        """What it says without the defect."""
        return self._right(case, inputs)

    def cell(self, name: str, run: Callable[[Case, Tensors], Tensors]) -> Cell:
        plain_cell = planted.cell(self.op, run, self._program, name=f"planted.{self.op}.{name}")
        return _Shared(
            op=self.op,
            subject=plain_cell.subject,
            lane=plain_cell.lane,
            presence=plain_cell.presence,
            bound=self._bound,
            faults=tuple(self._dictionary.values()) if self._named else (),
        )

    def _rightly(self, case: Case, inputs: Inputs) -> Tensors:
        if self._program is None:
            return planted.staged(case, inputs, case.expected) or {}
        return planted.rounded(case, self._program(case, inputs, planted.mode(case)))

    def _same(self, named: str, defect: str, case: Case, inputs: Inputs) -> bool:
        """Whether two entries of the dictionary are one fault in this case."""
        if named == defect:
            return True
        if defect not in self._dictionary:
            return False
        one, two = (self._dictionary[name].answer(case, inputs) for name in (named, defect))
        if one is None or two is None:
            return False
        one, two = (planted.in_full(case, answer) for answer in (one, two))
        return alike(one, two, case.judged(inputs))


@dataclass(frozen=True, kw_only=True)
class _Shared(Cell):
    """A cell that has what all wrong kernels share computed once."""

    bound: Program = field(repr=False)
    faults: tuple[Defect, ...] = field(repr=False)

    @property
    def envelope(self) -> Program:
        return self.bound

    @property
    def dictionary(self) -> tuple[Defect, ...]:
        return self.faults


class _Kernel:
    """A planted kernel: a subject's `run`, its cell, and what became of it."""

    def __init__(self, trial: Trial, fault: Fault) -> None:
        self._cell = trial.cell(fault.name, self)
        self._remembers = isinstance(fault, Lasting)
        self._right, wrong = trial.right, _wrong(trial, fault)
        if isinstance(fault, Misread):
            self._right = Once(native_yarn.run)
        self._wrong = wrong if self._remembers else Once(wrong)
        self.said: Tensors = {}
        self.tally = Tally(
            op=trial.op,
            defect=fault.name,
            dtype=trial.dtype,
            held_to=self._cell.held_to,
            bugs=fault.bugs,
            listed=isinstance(fault, Defect) and fault.listed,
            rounding=isinstance(fault, Defect) and fault.rounding,
        )

    def __call__(self, case: Case, tensors: Tensors) -> Tensors:
        """The subject's run. Inputs are made anew, so that what is known of them is found again;
        but one that remembers is told what it is really given."""
        inputs = case.inputs()
        wrong = self._wrong(case, tensors if self._remembers else inputs)
        self.said = self._right(case, inputs) if wrong is None else wrong
        return dict(self.said)

    def put(self, case: Case, inputs: Inputs) -> Record | None:
        """The ordinary path's record, or None where the answer is the right one, to the bit."""
        if not self._remembers and self._wrong(case, inputs) is None:
            return None
        right, judged = self._right(case, inputs), case.judged(inputs)
        if not self._remembers and alike(self(case, {}), right, judged):
            return None
        record = ask(case, self._cell)
        if alike(self.said, right, judged) and record.status not in BAD:
            return None
        return record


def _wrong(trial: Trial, fault: Fault) -> Callable[[Any, Inputs], Tensors | None]:
    """What a kernel with this fault says, or None where it can't show."""
    if isinstance(fault, Misread):
        return lambda case, inputs: _translated(case, inputs, fault)
    defect = fault.start() if isinstance(fault, Lasting) else fault
    return lambda case, inputs: trial.answer(defect, case, inputs)


def _translated(case: Any, inputs: Inputs, fault: Misread) -> Tensors | None:
    """What our translator makes of a misread config; one that it refuses has no wrong answer."""
    try:
        return native_yarn.run(case, inputs, fault.reads)
    except RopeError:
        return None


def _count(tally: Tally, question: Question, record: Record) -> None:
    """A record of a fault that shows, but for whether the name of the fault is right."""
    bad = record.status in BAD
    if not question.drawn:
        tally.given_shown += 1
        tally.given_killed += bad
    else:
        tally.shown += 1
        tally.killed += bad
        if bad and tally.first is None:
            tally.first = tally.drawn
    tally.named += bool(record.fault)
    tally.exactly += record.fault == tally.defect


def alike(one: Mapping, two: Mapping, judged: Mapping[str, torch.Tensor]) -> bool:
    """Whether all judged elements are equal; a NaN is a NaN, and -0 is 0."""
    return all(bool(_equal(x, two[name])[judged.get(name, ...)].all()) for name, x in one.items())


def _equal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return x == y
    return (x == y) | (x.isnan() & y.isnan())
