"""What to ask: one file per op holding its Case, the strategy that draws cases, and pinned ones.

Imports `references` below it. Knows no engine.
"""

import importlib
import pkgutil
from types import ModuleType

SHARED = frozenset(
    {
        "case", "values", "layouts", "defects", "drawing", "memory", "strategy", "probes", "ranges",
    }
)  # fmt: skip
OPS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in SHARED))


def load(op: str) -> ModuleType:
    """The module `cases.<op>`: its Case class as CASE, strategy(), PINNED and FEATURES.

    Raises:
        ValueError: no such op.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} is unknown; expected one of {', '.join(OPS)}")
    return importlib.import_module(f"cases.{op}")
