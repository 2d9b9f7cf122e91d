"""What a count of kills says of the probability of a kill, and of missing the fault."""

import math
from collections.abc import Callable

CONFIDENCE = 0.95
"""Of every interval."""


def interval(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The Clopper-Pearson interval of a probability, given `hits` in `trials` independent trials.

    Its ends are the probabilities under which as many hits or more, and as many or fewer, have the
    chance (1 - confidence) / 2: it covers at least as often as it says (Biometrika 26, 1934).

    Raises:
        ValueError: hits is not between 0 and trials, or there is no trial.
    """
    if not 0 <= hits <= trials or trials == 0:
        raise ValueError(f"hits={hits} of trials={trials}: expected 0 <= hits <= trials >= 1")
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else _root(lambda p: _at_most(trials - hits, trials, 1 - p) - tail)
    high = 1.0 if hits == trials else _root(lambda p: tail - _at_most(hits, trials, p))
    return low, high


def miss(probability: float, cases: int) -> float:
    """The chance that none of `cases` independent cases kills, each with that probability."""
    return 0.0 if probability >= 1 else math.exp(cases * math.log1p(-probability))


def _at_most(hits: int, trials: int, p: float) -> float:
    """P(X <= hits) of a binomial X."""
    if p <= 0 or p >= 1:
        return float(p <= 0 or hits >= trials)
    odds, whole = math.log(p), math.log1p(-p)
    return math.fsum(
        math.exp(_log_choose(trials, k) + k * odds + (trials - k) * whole) for k in range(hits + 1)
    )


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function of a probability is zero, by bisection to the last bit or so."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
