"""How a person's own function is asked an op's question: one file per op, named after it.

A function is called by keywords. It names those that it wants, and thereby what it can be asked:
one that takes `window` is asked about windows. Each file has PARAMETERS, what may be taken;
`arguments`, what is passed for each; OUTPUTS, in the order in which several are returned;
FREE, features that show in the tensors alone and are asked only where `--features` names them;
and RETURNS, a sentence.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from harness.subject import Tensors

OPS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One keyword that a function may take.

    meaning: with shape, dtype and unit. features: optional case fields that a function which takes
    it can be asked. needed: no function does without.
    """

    meaning: str
    features: tuple[str, ...] = ()
    needed: bool = False


def load(op: str) -> ModuleType:
    """The module `harness.signatures.<op>`.

    Raises:
        ValueError: no such op.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} has no signature; expected one of {', '.join(OPS)}")
    return importlib.import_module(f"harness.signatures.{op}")


def calling(
    function: Callable[..., Any],
    names: tuple[str, ...],
    arguments: Callable[[Any, Tensors], Mapping[str, Any]],
    outputs: tuple[str, ...],
) -> Callable[[Any, Tensors], Tensors]:
    """The subject's call: `function` with the arguments that it names, its answer by name."""

    def run(case: Any, tensors: Tensors) -> Tensors:
        given = arguments(case, tensors)
        answer = function(**{name: given[name] for name in names})
        return by_name(answer, outputs, case.output_dtypes())

    return run


def by_name(answer: Any, outputs: tuple[str, ...], asked: Mapping[str, str]) -> Tensors:
    """A tensor is the first output, a tuple the first few; what was not asked for is left out."""
    if isinstance(answer, Mapping):
        named = dict(answer)
    else:
        several = answer if isinstance(answer, tuple | list) else (answer,)
        if len(several) > len(outputs):
            raise ValueError(
                f"the function returned {len(several)} values, expected at most "
                f"{', '.join(outputs)}"
            )
        named = dict(zip(outputs, several, strict=False))
    return {name: x for name, x in named.items() if name in asked or name not in outputs}
