"""What every op's strategy draws with: seeds, subsets of claimed features, boundary lengths."""

import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from cases.case import Case
from cases.undrawn import Strategies

if TYPE_CHECKING or importlib.util.find_spec("hypothesis"):
    from hypothesis import strategies as st
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.constants_ast import Constants

    # Hypothesis also draws constants found in the source of whatever local modules are imported:
    # the same seed would ask one thing under pytest and another in `parity repro`.
    providers._get_local_constants = Constants
else:
    st = Strategies()

T = TypeVar("T")
C = TypeVar("C", bound=Case)
P = ParamSpec("P")

seeds = st.integers(0, 2**32 - 1)
"""Seeds of the value stream; the smallest shrunk case has seed 0."""


def subset(draw: st.DrawFn, claims: frozenset[str], features: Iterable[str]) -> frozenset[str]:
    """Some of the `features` that are claimed, each in half of the draws; shrinks to none.

    One choice a feature, not one number for all: Hypothesis then drops them one by one.
    """
    return frozenset(name for name in features if name in claims and draw(_EITHER))


def anew(
    function: Callable[Concatenate[st.DrawFn, P], C],
) -> Callable[P, st.SearchStrategy[C]]:
    """A composite strategy of which each case is drawn afresh.

    Hypothesis follows an example with up to five in which one part is a copy of another of the
    same kind; with two dozen flags a case, most of a small budget then goes to twins (33 distinct
    cases in 60 draws). It leaves unique collections alone, and a list of one is one.
    """
    composite = st.composite(function)

    @functools.wraps(function)
    def strategy(*args: P.args, **kwargs: P.kwargs) -> st.SearchStrategy[C]:
        cases = composite(*args, **kwargs)
        return st.lists(cases, min_size=1, max_size=1, unique_by=_identity).map(_only)

    return strategy


def _identity(case: Case) -> str:
    return case.id


def _only(found: list[C]) -> C:
    return found[0]


_EITHER = st.booleans()


def among(*options: T) -> st.SearchStrategy[T]:
    """`st.sampled_from`, made once for equal options: to make one takes as long as ten draws."""
    return _sampled(options, tuple(map(type, options)))


@functools.lru_cache(maxsize=4096)
def _sampled(options: tuple[Any, ...], types: tuple[type, ...]) -> Any:
    del types  # they tell 1 from 1.0 and True
    return st.sampled_from(options)


@functools.lru_cache(maxsize=4096)
def between(low: int, high: int) -> st.SearchStrategy[int]:
    """`st.integers`, made once for equal bounds."""
    return st.integers(low, high)


RARELY = st.sampled_from((False,) * 7 + (True,))
"""True in one of eight draws: for sizes that cost as much as all others together. Bugs live at
boundaries, which small shapes have as well."""


def mostly(usual: T, others: Sequence[T]) -> st.SearchStrategy[T]:
    """`usual` in half of the draws, else one of `others`."""
    return st.sampled_from((usual,) * len(others) + tuple(others))


@functools.cache
def near(*bounds: int, low: int, high: int) -> st.SearchStrategy[int]:
    """Lengths in [low, high]: any, or one of `bounds` and its neighbours.

    Raises:
        ValueError: the range is empty.
    """
    if low > high:
        raise ValueError(f"low={low} must be at most high={high}")
    edges = sorted({b + d for b in bounds for d in (-1, 0, 1) if low <= b + d <= high})
    anywhere = st.integers(low, high)
    return st.one_of(st.sampled_from(edges), anywhere) if edges else anywhere
