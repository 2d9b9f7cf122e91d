"""The matched filter: which known fault explains a residual, and how much of it.

For each fault of the op's dictionary the reference answers the faulty question; the difference to
the right answer is the direction g. The residual r of an answer is projected on g with weights
1/sigma**2, alpha = sum(g r / s2) / sum(g g / s2), where sigma is a standard deviation of the
declared rounding error; its standard error is taken over clusters (rows), which share score
errors (NUMERICS 4, T2; cluster-robust sandwich, Liang & Zeger 1986). A correct answer gives
alpha = 0 within a few standard errors, a faulty one alpha = 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cases.case import Case, Inputs
from cases.defects import Defect
from harness.arithmetic.formats import FORMATS
from harness.arithmetic.midrad import MidRad

STANDARD_ERRORS = 8.0
"""Below this z a direction explains nothing: 444 correct runs reached 3.1 (NUMERICS 3.8)."""
UNEXPLAINED = 0.25
"""The share of a residual that its name may leave, where that is more than rounding explains. In a
single row nearly every direction is significant; one that is there leaves nothing."""
LEAST_ALPHA, MOST_ALPHA = 0.3, 3.0
"""A fault that is there has a coefficient near 1; far from it another cause fits by chance."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A named explanation: `alpha` times the defect's residual, `z` standard errors from none.

    explained: the share of the residual's weighted energy that the whole fault (alpha = 1) takes
        away, 1 - |r - g|**2 / |r|**2; of collinear faults the one of the right size wins.
    """

    defect: Defect
    alpha: float
    z: float
    explained: float

    def __str__(self) -> str:
        return f"{self.defect.sentence} ({self.alpha:.2f} x fault, z {self.z:.3g})"


def name(
    case: Case,
    inputs: Inputs,
    observed: Mapping[str, torch.Tensor],
    envelope: Mapping[str, MidRad],
    dictionary: tuple[Defect, ...],
) -> Fault | None:
    """The fault that explains the answer best, or None when none does.

    envelope: the op's envelope program, whose radii set the scale of rounding errors.
    """
    residual = Residual(case, inputs, observed, envelope)
    found = [fault for defect in dictionary if (fault := residual.fit(defect)) is not None]
    return max(found, key=lambda fault: fault.explained, default=None)


class Residual:
    """What is left of an answer without the right one, in units of the rounding error's sigma."""

    def __init__(
        self,
        case: Case,
        inputs: Inputs,
        observed: Mapping[str, torch.Tensor],
        envelope: Mapping[str, MidRad],
    ) -> None:
        self._case, self._inputs = case, inputs
        self._right = case.expected(inputs)
        self._usable, self._sigma, self._rest = {}, {}, {}
        self._noise = 0.0  # energy that rounding is expected to have: one for each element
        judged = case.judged(inputs)
        for key, truth in self._right.items():
            rest = observed[key].double() - truth.double()
            usable = rest.isfinite() & envelope[key].rad.isfinite()
            if (mask := judged.get(key)) is not None:
                usable &= mask
            self._usable[key] = usable
            self._noise += float(usable.sum()) if observed[key].is_floating_point() else 0.0
            self._sigma[key] = _sigma(observed[key], envelope[key])
            self._rest[key] = (rest / self._sigma[key]).masked_fill(~usable, 0.0)

    def direction(self, defect: Defect) -> dict[str, torch.Tensor] | None:
        """The whole fault in the residual's units; None where it can't show."""
        wrong = defect.answer(self._case, self._inputs)
        if wrong is None:
            return None
        out = {}
        for key, truth in self._right.items():
            shift = (wrong[key].double() - truth.double()) / self._sigma[key]
            out[key] = shift.masked_fill(~(self._usable[key] & shift.isfinite()), 0.0)
        return out

    def left(self, direction: Mapping[str, torch.Tensor]) -> float:
        """The share of the residual's energy that is left when the whole fault is taken away.

        The energy of rounding is added to both: of a right answer a fault leaves more than 1.
        """
        least = max(self._noise, 1.0)
        rest = sum(float((self._rest[key] - g).square().sum()) for key, g in direction.items())
        return (rest + least) / (sum(float(r.square().sum()) for r in self._rest.values()) + least)

    def fit(self, defect: Defect) -> Fault | None:
        """The defect as an explanation, over all outputs; None if it is not significant."""
        direction = self.direction(defect)
        if direction is None:
            return None
        pairs = [(g, self._rest[key]) for key, g in direction.items()]
        gains = torch.cat([_by_row(g * r) for g, r in pairs])
        energies = torch.cat([_by_row(g * g) for g, _ in pairs])
        total = sum(float(r.square().sum()) for _, r in pairs)
        strength = float(energies.sum())
        if strength == 0 or total == 0:
            return None
        alpha = float(gains.sum()) / strength
        spread = float(((gains - alpha * energies) ** 2).sum()) ** 0.5 / strength
        # With few rows the sandwich estimate is unreliable; the declared sigma is its lower bound.
        z = alpha / max(spread, strength**-0.5)
        if z < STANDARD_ERRORS or not LEAST_ALPHA <= alpha <= MOST_ALPHA:
            return None
        if total - alpha * alpha * strength > max(UNEXPLAINED * total, self._noise):
            return None
        explained = (2 * alpha - 1) * strength / total
        return Fault(defect=defect, alpha=alpha, z=z, explained=explained)


def _by_row(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis: the elements of a row share their score errors."""
    return x.sum(-1).reshape(-1) if x.dim() > 1 else x


def _sigma(got: torch.Tensor, envelope: MidRad) -> torch.Tensor:
    """Standard deviation of the rounding error that the dtypes explain: a sixth of the radius."""
    if not got.is_floating_point():  # exact: one wrong element is significant
        return torch.full_like(envelope.mid, 0.5 / STANDARD_ERRORS)
    fmt = FORMATS[str(got.dtype).removeprefix("torch.")]
    rounding = fmt.u * envelope.mid.abs() + fmt.tiny / 2
    return ((envelope.rad / 6) ** 2 + rounding * rounding / 3).sqrt()
