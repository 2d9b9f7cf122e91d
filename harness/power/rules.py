"""What the rules of other harnesses say of an answer: for comparison, never for a verdict.

Each gets what a person would give it: the answer, the reference rounded to the answer's dtype,
and, for the rule that asks for one, a plain PyTorch run in the case's own dtype. Elements without
a meaning are left out, as they are for us.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, Tensor], bool]
"""(answer, reference, plain run), one output's judged elements each, to: does it pass?"""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One case's outputs by name: the right ones, the plain run's, and the masks of both."""

    right: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    judged: Mapping[str, Tensor]

    def passes(self, rule: Rule, observed: Mapping[str, Tensor]) -> bool:
        """Whether every output of `observed` passes."""
        return all(
            rule(*(self._kept(name, x[name]) for x in (observed, self.right, self.plain)))
            for name in self.right
        )

    def _kept(self, name: str, x: Tensor) -> Tensor:
        return x[self.judged[name]] if name in self.judged else x


def _close(tolerance: float | None) -> Rule:
    """torch.testing.assert_close, with its defaults or with atol = rtol = `tolerance`."""

    def rule(observed: Tensor, right: Tensor, plain: Tensor) -> bool:
        del plain
        try:
            torch.testing.assert_close(observed, right, rtol=tolerance, atol=tolerance)
        except AssertionError:
            return False
        return True

    return rule


def _twice_plain(observed: Tensor, right: Tensor, plain: Tensor) -> bool:
    """The largest error is at most twice that of a plain run (flash-attention's tests)."""
    return bool(_furthest(observed, right) <= 2 * _furthest(plain, right))


def _furthest(x: Tensor, right: Tensor) -> Tensor:
    """The largest distance; equal infinities are 0 apart, a NaN is infinitely far."""
    apart = (x.double() - right.double()).abs()
    apart = torch.where(x == right, 0.0, apart).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return apart.max() if apart.numel() else torch.zeros(())


def _nmse(observed: Tensor, right: Tensor, plain: Tensor) -> bool:
    """The mean squared error over the mean square (llama.cpp's test-backend-ops)."""
    del plain
    x, y = observed.double(), right.double()
    return bool((x - y).square().sum() <= 5e-4 * y.square().sum())


def _cosine(observed: Tensor, right: Tensor, plain: Tensor) -> bool:
    """One angle over the whole tensor; two tensors of zeros agree."""
    del plain
    x, y = observed.double().flatten(), right.double().flatten()
    size = x.norm() * y.norm()
    return bool((x @ y) > 0.99 * size) if bool(size > 0) else torch.equal(x, y)


RULES: dict[str, Rule] = {
    "assert_close": _close(None),
    "1e-2": _close(1e-2),
    "2e-2": _close(2e-2),
    "1.5e-1": _close(1.5e-1),
    "2x plain": _twice_plain,
    "NMSE": _nmse,
    "cosine": _cosine,
}
"""By the name that a table's column has; numbers are atol = rtol."""
