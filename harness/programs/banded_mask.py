"""The arithmetic of masks: there is none. What is visible is exact, whoever computes it."""

from cases.banded_mask import BandedMaskCase
from cases.case import Inputs
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import Mode

EXACT = True
"""Whether the op has no rounding at all, so that its envelope is a single answer."""
LIMITS: dict[str, float] = {}
"""The largest strength of a fault that may pass this op's generator unseen, in the op's first dtype
under the envelope (harness.certificate): 1, the whole fault, where none is given; infinity: the
fault can't show in that dtype."""


def envelope(case: BandedMaskCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
    """The reference's answer with radius 0."""
    del mode
    return {name: MidRad(x.double()) for name, x in case.expected(inputs).items()}
