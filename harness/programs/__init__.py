"""The declared arithmetic of subjects, one file per op; imports `harness.arithmetic` and `cases`.

`envelope` of every file is the widest program that the dtypes alone allow; EXACT says whether the
op has no rounding at all.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

OPS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


def load(op: str) -> ModuleType:
    """The module `harness.programs.<op>`.

    Raises:
        ValueError: no such op.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} has no programs; expected one of {', '.join(OPS)}")
    return importlib.import_module(f"harness.programs.{op}")


def envelope(op: str) -> Any:
    """The op's envelope: a Program (harness.subject) from dtypes alone."""
    return load(op).envelope
