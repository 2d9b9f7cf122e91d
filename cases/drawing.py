"""What every op's strategy draws with: seeds, subsets of claimed features, boundary lengths."""

from collections.abc import Iterable

from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
"""Seeds of the value stream; the smallest shrunk case has seed 0."""


def subset(draw: st.DrawFn, claims: frozenset[str], features: Iterable[str]) -> frozenset[str]:
    """Some of the `features` that are claimed, each in half of the draws."""
    return frozenset(name for name in features if name in claims and draw(st.booleans()))


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
