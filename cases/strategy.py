"""The one strategy that Hypothesis is given: a case, drawn as a sequence of plain choices."""

from collections.abc import Callable
from typing import TypeVar

from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.constants_ast import Constants
from hypothesis.strategies import SearchStrategy

from cases.case import Case

C = TypeVar("C", bound=Case)

# Hypothesis also draws constants found in the source of whatever local modules are imported:
# the same seed would ask one thing under pytest and another in `parity repro`.
providers._get_local_constants = Constants


class Drawn(SearchStrategy[C]):
    """Cases that a function makes of choices.

    The choices are made of the source itself, not of strategies within this one. A strategy costs
    twice as much as the choice that it makes; and Hypothesis follows an example with up to five in
    which one part is a copy of another of the same kind: with two dozen flags a case, most of a
    small budget would go to twins (33 distinct cases in 60 draws). Here there are no parts.
    """

    def __init__(self, make: Callable[[ConjectureData], C]) -> None:
        super().__init__()
        self._make = make

    def do_draw(self, data: ConjectureData) -> C:
        return self._make(data)
