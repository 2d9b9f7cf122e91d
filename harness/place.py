"""Where an answer is wrong: its worst element, and what its wrong elements have in common."""

from collections.abc import Mapping

import torch

from cases.case import Case
from cases.ranges import ranges
from harness.arithmetic.midrad import MidRad
from harness.compare import Verdict, claimed, distance

RANGES = 3
"""Runs of numbers that are written out; of more, only their count is told."""


def sentence(
    case: Case,
    verdict: Verdict,
    observed: Mapping[str, torch.Tensor],
    allowed: Mapping[str, MidRad],
    judged: Mapping[str, torch.Tensor],
) -> str:
    """The verdict's sentence, with the worst element by the op's own names, and the extent.

    verdict: of `harness.compare` on the same observed, allowed and judged.
    """
    if verdict.allowed or not verdict.elements:
        return verdict.why
    one = tuple(torch.tensor([i]) for i in verdict.where)
    at = ", ".join(f"{axis} {int(i)}" for axis, i in case.place(verdict.output, one).items())
    return f"{verdict.why}, at {at}; {extent(case, observed, allowed, judged)}"


def extent(
    case: Case,
    observed: Mapping[str, torch.Tensor],
    allowed: Mapping[str, MidRad],
    judged: Mapping[str, torch.Tensor],
) -> str:
    """How much of each output is outside, and the places that all of that shares.

    e.g. "out: 6 of 96 elements outside, all in request 1, query row 2".
    """
    parts = []
    for name, wrong in outside(observed, allowed, judged).items():
        asked = claimed(allowed[name], judged.get(name))
        count = f"{name}: {int(wrong.sum())} of {int(asked.sum())} elements outside"
        shared = _shared(case, name, wrong, asked)
        parts.append(count + (f", all in {', '.join(shared)}" if shared else ""))
    return "; ".join(parts)


def outside(
    observed: Mapping[str, torch.Tensor],
    allowed: Mapping[str, MidRad],
    judged: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The outputs that have an element outside, each with the bool mask of those elements."""
    found = {
        name: claimed(bound, judged.get(name)) & ~(distance(observed[name], bound) <= 1)
        for name, bound in allowed.items()
    }
    return {name: wrong for name, wrong in found.items() if bool(wrong.any())}


def _shared(case: Case, name: str, wrong: torch.Tensor, asked: torch.Tensor) -> list[str]:
    """The names along which the wrong elements take fewer values than the judged ones."""
    hit = case.place(name, wrong.nonzero(as_tuple=True))
    among = case.place(name, asked.nonzero(as_tuple=True))
    found = []
    for axis, values in hit.items():
        some, every = values.unique().tolist(), among[axis].unique().numel()
        if len(some) == every:
            continue
        runs = ranges(some)
        said = f"{len(some)} of {every}" if runs.count(",") >= RANGES else runs
        found.append(f"{axis} {said}")
    return found
