"""Reading softmax weights from rows of attention whose value j is a multiple of unit vector j."""

import torch

STEPS = 4
"""Scores of the ladder that a query gives to its keys: 0, 1/2, 1, 3/2, and again."""


def ladder(step: float, *indices: torch.Tensor) -> torch.Tensor:
    """(sum of the indices mod 4) * step, broadcast, float64."""
    total = torch.zeros((), dtype=torch.int64)
    for index in indices:
        total = total + index
    return (total % STEPS).double() * step


def rung(scale: float) -> float:
    """The power of two that makes the ladder's step about half a logit at this softmax scale."""
    mantissa, exponent = torch.frexp(torch.tensor(0.5 / scale, dtype=torch.float64))
    return float(torch.ldexp(torch.ones(()), exponent - (mantissa < 0.75).int()))


LEAST = 2.0**-12
"""Share of the largest weight above which a key is visible. A hidden key has none at all, and the
ladder spans one and a half logits: even scores four times too large leave e**-6."""


def seen(row: torch.Tensor) -> list[int]:
    """The keys that have weight in `row`."""
    return (row > row.max().clamp_min(0) * LEAST).nonzero().flatten().tolist()


def scores(row: torch.Tensor, right: torch.Tensor, keys: list[int]) -> str | None:
    """How the logits of `keys` stand to each other, where that is not as it should be."""
    got, want = (x[keys].double().log() for x in (row, right))
    got, want = got - got[0], want - want[0]
    worst = int((got - want).abs().argmax())
    if worst == 0:
        return None
    said = (
        f"the score of key {keys[worst]} lies {float(got[worst]):.4g} above that of key {keys[0]}, "
        f"expected {float(want[worst]):.4g}"
    )
    if bool((want != 0).any()):
        slope = float((got * want).sum() / (want * want).sum())
        left, all_ = (got - slope * want).square().sum(), (got - want).square().sum()
        if float(left) < 0.1 * float(all_):  # one factor takes nine tenths of the deviation away
            said += f": scores are {slope:.5g} x what they should be"
    return said
