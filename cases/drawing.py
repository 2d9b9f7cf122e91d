"""What every op's generator draws with: seeds, subsets of claimed features, boundary lengths."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from cases.case import Case

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
C = TypeVar("C", bound=Case)
P = ParamSpec("P")


class Source(Protocol):
    """Where choices come from: Hypothesis, which then makes each of them smaller."""

    def draw_boolean(self, p: float = ...) -> bool: ...
    def draw_integer(self, min_value: int, max_value: int) -> int: ...


class Draw:
    """Choices of a case. Whatever is drawn shrinks to what is named first, or to the lowest.

    Each is one choice of the source, so that shrinking one moves no other; a choice that is made
    whether it is used or not keeps those after it in their places.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def either(self) -> bool:
        """True in half of the draws."""
        return self._source.draw_boolean(0.5)

    def rarely(self) -> bool:
        """True in one of eight draws: for sizes that cost as much as all others together. Bugs
        live at boundaries, which small shapes have as well."""
        return self._source.draw_boolean(0.125)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return self._source.draw_integer(low, high)

    def seed(self) -> int:
        """Of the value stream; the smallest shrunk case has seed 0."""
        return self.between(0, 2**32 - 1)

    def among(self, *options: T) -> T:
        """One of the options."""
        return options[self.between(0, len(options) - 1)]

    def mostly(self, usual: T, others: Sequence[T]) -> T:
        """`usual` in half of the draws, else one of `others`."""
        index = self.between(0, 2 * len(others) - 1) - len(others)
        return others[index] if index >= 0 else usual

    def subset(self, claims: frozenset[str], features: Iterable[str]) -> frozenset[str]:
        """Some of the `features` that are claimed, each in half of the draws; shrinks to none.

        One choice a feature, not one number for all: they are then dropped one by one.
        """
        return frozenset(name for name in features if name in claims and self.either())

    def near(self, *bounds: int, low: int, high: int) -> int:
        """A length in [low, high]: any, or, in half of the draws, one of `bounds` or next to it.

        Raises:
            ValueError: the range is empty.
        """
        if low > high:
            raise ValueError(f"low={low} must be at most high={high}")
        edges = _edges(bounds, low, high)
        return self.among(*edges) if edges and self.either() else self.between(low, high)


@functools.lru_cache(maxsize=4096)
def _edges(bounds: tuple[int, ...], low: int, high: int) -> tuple[int, ...]:
    """The bounds and their neighbours that lie in [low, high]."""
    return tuple(sorted({b + d for b in bounds for d in (-1, 0, 1) if low <= b + d <= high}))


def drawn(
    function: Callable[Concatenate[Draw, P], C],
) -> Callable[P, "SearchStrategy[C]"]:
    """The Hypothesis strategy of the cases that `function` draws.

    Where Hypothesis is not installed (in an engine's own environment, whither cases are sent) the
    modules of the ops can be imported all the same.
    """

    @functools.wraps(function)
    def strategy(*args: P.args, **kwargs: P.kwargs) -> "SearchStrategy[C]":
        from cases.strategy import Drawn

        return Drawn(functools.partial(_from, function, args, kwargs))

    return strategy


def _from(function: Callable[..., C], args: Any, kwargs: Any, source: Source) -> C:
    return function(Draw(source), *args, **kwargs)
