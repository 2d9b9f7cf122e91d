"""Observed against allowed, element by element. Never asserts, never succeeds early."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from harness.arithmetic.formats import FORMATS
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.verdict import excess

INFINITE = float("inf")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How far an answer lies from what its program allows.

    excess: the largest distance over radius of all judged elements; inf where none is allowed.
    exact: elements that equal the program's own rounding bit for bit.
    elements: elements judged. output, where: the worst one. why: a sentence when excess > 1.
    """

    excess: float
    exact: int
    elements: int
    output: str = ""
    where: tuple[int, ...] = ()
    why: str = ""

    @property
    def allowed(self) -> bool:
        return self.excess <= 1


def compare(
    observed: Mapping[str, torch.Tensor],
    expected: Mapping[str, MidRad],
    judged: Mapping[str, torch.Tensor],
) -> Verdict:
    """The verdict on outputs that keep the contract (names, shapes, dtypes).

    judged: per output, a bool mask of the elements with a meaning; absent means all.
    A NaN, in the answer or in the program, is infinitely far; so is an answer with no element.
    """
    worst, exact, elements, output, where = -1.0, 0, 0, "", ()
    for name, allowed in expected.items():
        got = observed[name]
        if got.numel() == 0:
            why = f"{name} is empty: nothing to judge"
            return Verdict(excess=INFINITE, exact=0, elements=0, output=name, why=why)
        far = distance(got, allowed)
        hit = far == 0  # the program's own rounding (either one at a tie)
        mask = claimed(allowed, judged.get(name))
        if bool(mask.all()):
            elements += got.numel()
            exact += int(hit.sum())
        else:
            elements += int(mask.sum())
            exact += int((hit & mask).sum())
            far = torch.where(mask, far, -1.0)
        far = far.reshape(-1)
        top = int(far.argmax())
        if (most := float(far[top])) > worst:
            worst, output = most, name
            where = tuple(map(int, np.unravel_index(top, got.shape)))
    if elements == 0:
        return Verdict(
            excess=INFINITE, exact=0, elements=0, why="no element of the answer has a meaning"
        )
    why = "" if worst <= 1 else _sentence(observed[output], expected[output], output, where, worst)
    return Verdict(
        excess=worst, exact=exact, elements=elements, output=output, where=where, why=why
    )


def claimed(allowed: MidRad, judged: torch.Tensor | None) -> torch.Tensor:
    """The elements of one output that have a meaning (`judged`; None: all) and a bound.

    An infinite radius claims nothing.
    """
    bounded = ~allowed.rad.isinf()
    return bounded if judged is None else bounded & judged


def distance(got: torch.Tensor, allowed: MidRad) -> torch.Tensor:
    """Excess per element of one output, float64; NaN is infinitely far."""
    if got.is_floating_point():
        return excess(got, allowed, FORMATS[str(got.dtype).removeprefix("torch.")])
    apart = (got.double() - allowed.mid).abs()  # integers and bools are exact
    return torch.where(apart <= allowed.rad, 0.0, INFINITE)


def _sentence(
    got: torch.Tensor, allowed: MidRad, name: str, where: tuple[int, ...], worst: float
) -> str:
    observed, mid, rad = got[where].item(), float(allowed.mid[where]), float(allowed.rad[where])
    return (
        f"{name}{list(where)} is {observed!r}, expected {mid:.9g} within {rad:.3g}: "
        f"{worst:.3g} x what is allowed"
    )
