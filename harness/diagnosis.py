"""Which fault a finding is: those that explain its smallest case are told apart on other cases.

The smallest case is the one in which most faults are the same: with two keys and a window of one,
"one key too many" and "window ignored" are one answer. So the candidates are followed through
more cases, wrong and right, and the one that leaves the least unexplained over all is the name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from cases import probes
from cases.case import Case, Inputs
from cases.defects import Defect
from harness import place
from harness.arithmetic.mode import DET
from harness.faults import Residual
from harness.record import Record
from harness.run import Cell, answer, ask

DECISIVE = math.log(10)
"""How much less, in the logarithm of what is left unexplained, decides between two faults."""
ENOUGH = 12
"""Drawn cases, in which a fault would show, after which its name stands or falls."""


class Diagnosis:
    """The faults that may be behind a wrong answer, in the order of the dictionary.

    candidates: those left. Few rows may lie along some fault by chance, so a name has to hold in
    most drawn cases in which the fault would show: the subject may answer them rightly.
    """

    def __init__(self, cell: Cell, case: Case) -> None:
        self._cell = cell
        self._left: dict[Defect, float] = {}
        self._held: list[bool] = []
        inputs = case.inputs()
        if (residual := self._residual(case, inputs)) is not None:
            fit = [defect for defect in cell.dictionary if residual.fit(defect) is not None]
            self._weigh(residual, fit)
        self._fits = self.fault

    @property
    def candidates(self) -> tuple[Defect, ...]:
        return tuple(self._left)

    @property
    def settled(self) -> bool:
        return not self._left or (len(self._left) == 1 and len(self._held) >= ENOUGH)

    @property
    def fault(self) -> Defect | None:
        """The candidate that leaves the least unexplained, of equals the first; or none of them."""
        best = min(self._left, key=lambda defect: self._left[defect], default=None)
        if best is None or self._held.count(True) < self._held.count(False):
            return None
        return best if self._held or self._left[best] < -DECISIVE else None

    def ask(self, case: Case, *, drawn: bool = False) -> None:
        """Put the case to the subject if the candidates answer it differently; drop the losers.

        drawn: it was not chosen for being answered wrong, so it tells whether a name holds.
        """
        inputs = case.inputs()
        cell = self._cell
        if self.settled or cell.subject.refuses(case) or case.vacuous(inputs):
            return
        if cell.divergences(case):
            return
        if _alike([None, *(defect.answer(case, inputs) for defect in self._left)]):
            return
        if (residual := self._residual(case, inputs)) is not None:
            shares = self._weigh(residual, list(self._left))
            if drawn:
                self._held.append(min(shares) < 0)

    def told(self, record: Record, case: Case) -> Record:
        """`record`, which is of `case`, with the fault's name and the reading of a probe.

        The case is asked again; what is not wrong twice in the same way is an error.
        """
        names = dict.fromkeys((self.fault, self._fits))  # a name may be all that is held against it
        for fault in names:
            suspected = frozenset({fault.name} if fault else ())
            again = ask(case, replace(self._cell, suspected=suspected))
            if again.status is record.status:
                break
        else:
            return self._cell.unrepeatable(record, case)
        said = [again.why, self._reading(case)]
        if self._fits is not None and not again.fault:
            said.insert(0, f"in this case as if {self._fits.sentence}, in others not")
        return replace(again, why="; ".join(filter(None, said)))

    def _reading(self, case: Case) -> str | None:
        """What a probe of the same shape reads, where one can be asked and is answered wrong."""
        for fill, probe in probes.alike(case).items():
            inputs = probe.inputs()
            if probe == case or self._cell.subject.refuses(probe) or probe.vacuous(inputs):
                continue
            if (observed := self._answer(probe, inputs)) is None:
                continue
            inputs = probe.anchored(inputs, observed)
            allowed = self._cell.envelope(probe, inputs, DET)
            wrong = place.outside(observed, allowed, probe.judged(inputs))
            said = probes.read(probe, inputs, {name: observed[name] for name in wrong})
            if said is not None:
                return f"the {fill.replace('_', ' ')} of this shape: {said}"
        return None

    def _residual(self, case: Case, inputs: Inputs) -> Residual | None:
        """None where the subject gives no answer to weigh."""
        if (observed := self._answer(case, inputs)) is None:
            return None
        inputs = case.anchored(inputs, observed)
        return Residual(case, inputs, observed, self._cell.envelope(case, inputs, DET))

    def _answer(self, case: Case, inputs: Inputs) -> Mapping[str, torch.Tensor] | None:
        """None where the subject raises, or breaks the contract: a finding of another kind."""
        try:
            return answer(case, inputs, self._cell)
        except Exception:
            return None

    def _weigh(self, residual: Residual, candidates: Sequence[Defect]) -> list[float]:
        """Add what each candidate leaves of the residual, as a share, in logarithms: the shares.

        Nothing taken away leaves all of it, 0; a fault that is not there leaves more.
        """
        shares = []
        for defect in candidates:
            direction = residual.direction(defect)
            share = 0.0 if direction is None else math.log(residual.left(direction))
            self._left[defect] = self._left.get(defect, 0.0) + share
            shares.append(share)
        most = min(self._left.values(), default=0.0) + DECISIVE
        self._left = {defect: left for defect, left in self._left.items() if left <= most}
        return shares


def _alike(answers: Sequence[Inputs | None]) -> bool:
    """Whether all faulty answers are the same (None: the right one)."""
    if any(answer is None for answer in answers):
        return all(answer is None for answer in answers)
    first, *others = [answer for answer in answers if answer is not None]
    return all(torch.equal(first[key], other[key]) for other in others for key in first)
