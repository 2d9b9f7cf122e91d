"""Owns the stand-in for a projection of a module: it returns what it was given."""

from typing import Any

from torch import Tensor, nn


class Given(nn.Module):
    """Stands where a module has a projection, and returns `answer` whatever it is applied to."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, hidden: Tensor) -> Tensor:
        del hidden
        return self.answer
