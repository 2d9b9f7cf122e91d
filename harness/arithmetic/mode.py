"""Which radius is asked for: the provable one or the probable one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Mode:
    """`det` radii hold for every rounding; `prob` radii hold for independent roundings.

    `sigmas` is lambda in P(|error| > lambda * sigma) <= 2 exp(-lambda^2 / 2), the
    Azuma-Hoeffding bound for mean-independent bounded roundings (Higham & Mary 2019; Ipsen &
    Zhou, arXiv:1906.10465). At 6 that is 3e-8 per element even if every rounding had magnitude
    u; their real root mean square is 0.41 u.
    """

    kind: Literal["prob", "det"]
    sigmas: float = 6.0

    @property
    def proves(self) -> bool:
        """True if an excess above 1 proves that the declaration is violated."""
        return self.kind == "det"


PROB = Mode(kind="prob")
DET = Mode(kind="det")
