"""A function of a question, computed once for it: many wrong kernels are asked the same cases."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cases.case import Case, Inputs
from cases.defects import Defect

KEPT = 4
"""Questions that are remembered: the case at hand, and the fresh seeds that it is asked with."""


class Once:
    """`f(case, inputs, *rest)`, the latest answers of which are kept.

    Inputs are told apart by the identity of their tensors, which live as long as the answer.
    """

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f
        self._kept: OrderedDict[Any, tuple[Inputs, Any]] = OrderedDict()

    def __call__(self, case: Case, inputs: Inputs, *rest: Any) -> Any:
        key = (case, rest, *((name, id(x)) for name, x in inputs.items()))
        if key not in self._kept:
            self._kept[key] = (dict(inputs), self._f(case, inputs, *rest))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[key][1]


@dataclass(frozen=True, kw_only=True)
class Answered(Defect):
    """A defect that answers each question once."""

    once: Once = field(repr=False, compare=False)

    def answer(self, case: Case, inputs: Inputs) -> Inputs | None:
        return self.once(case, inputs)


def answered(defect: Defect) -> Defect:
    return Answered(
        name=defect.name,
        bugs=defect.bugs,
        sentence=defect.sentence,
        question=defect.question,
        answer_of=defect.answer_of,
        once=Once(defect.answer),
    )
