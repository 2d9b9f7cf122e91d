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
    right = case.expected(inputs)
    judged = case.judged(inputs)
    found = []
    for defect in dictionary:
        wrong = defect.answer(case, inputs)
        if wrong is None:
            continue
        fit = _fit(right, wrong, observed, envelope, judged)
        if fit is not None:
            found.append(Fault(defect=defect, alpha=fit[0], z=fit[1], explained=fit[2]))
    found.sort(key=lambda fault: fault.explained, reverse=True)
    return found[0] if found else None


def _fit(
    right: Inputs,
    wrong: Inputs,
    observed: Mapping[str, torch.Tensor],
    envelope: Mapping[str, MidRad],
    judged: Mapping[str, torch.Tensor],
) -> tuple[float, float, float] | None:
    """alpha, z and explained share of one direction over all outputs; None if not significant."""
    gain, energy, total, spread = [], [], 0.0, []
    for key, truth in right.items():
        got = observed[key].double()
        direction, residual = wrong[key].double() - truth.double(), got - truth.double()
        sigma2 = _variance(observed[key], envelope[key])
        usable = residual.isfinite() & direction.isfinite()
        if (mask := judged.get(key)) is not None:
            usable &= mask
        weight = torch.where(usable, 1 / sigma2, 0.0)
        residual, direction = residual.nan_to_num(), direction.nan_to_num()
        rows = weight.dim() > 1
        g = (weight * direction * residual).flatten(0, -2 if rows else -1)
        e = (weight * direction * direction).flatten(0, -2 if rows else -1)
        gain.append(g.sum(-1) if rows else g)
        energy.append(e.sum(-1) if rows else e)
        total += float((weight * residual * residual).sum())
    gains, energies = (
        torch.cat([x.reshape(-1) for x in gain]),
        torch.cat([x.reshape(-1) for x in energy]),
    )
    strength = float(energies.sum())
    if strength == 0 or total == 0:
        return None
    alpha = float(gains.sum()) / strength
    spread = float(((gains - alpha * energies) ** 2).sum()) ** 0.5 / strength
    # With few rows the sandwich estimate is unreliable; the declared sigma is its lower bound.
    z = alpha / max(spread, strength**-0.5)
    if z < STANDARD_ERRORS or not LEAST_ALPHA <= alpha <= MOST_ALPHA:
        return None
    return alpha, z, (2 * alpha - 1) * strength / total


def _variance(got: torch.Tensor, envelope: MidRad) -> torch.Tensor:
    """Variance of the rounding error that the dtypes explain: a sixth of the radius is sigma."""
    if not got.is_floating_point():  # exact: one wrong element is significant
        return torch.full_like(envelope.mid, (0.5 / STANDARD_ERRORS) ** 2)
    fmt = FORMATS[str(got.dtype).removeprefix("torch.")]
    rounding = fmt.u * envelope.mid.abs() + fmt.tiny / 2
    return (envelope.rad / 6) ** 2 + rounding * rounding / 3
