"""Stands where Hypothesis is not installed: in an engine's own environment, where cases are asked
and never drawn, so that their modules can be imported."""

from collections.abc import Callable
from typing import Any, NoReturn


class Strategies:
    """Any expression of strategies is this object; drawing from one raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self

    def __getitem__(self, kind: Any) -> Any:
        return self

    def composite(self, define: Callable[..., Any]) -> Callable[..., NoReturn]:
        """In place of a strategy, what says why there is none."""

        def undrawn(*args: Any, **more: Any) -> NoReturn:
            raise ModuleNotFoundError(
                f"{define.__module__}.{define.__name__} draws with hypothesis, which is not "
                "installed here: cases are drawn by the harness, and sent"
            )

        return undrawn
