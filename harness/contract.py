"""What an answer must be before its numbers are looked at: names, shapes, formats, finiteness."""

from collections.abc import Mapping

import torch

from cases.case import Case, Inputs
from cases.layouts import memory


def broken(case: Case, observed: Mapping[str, torch.Tensor]) -> str | None:
    """The first term of the contract that `observed` breaks, as a sentence, or None.

    Finiteness is judged element by element later, since a program may declare an overflow; an
    empty output is always broken.
    """
    dtypes, shapes = case.output_dtypes(), case.output_shapes()
    if missing := sorted(set(dtypes) - set(observed)):
        return f"output {', '.join(missing)} is missing; got {', '.join(sorted(observed)) or '-'}"
    if extra := sorted(set(observed) - set(dtypes)):
        return f"output {', '.join(extra)} was not asked for"
    for name, dtype in dtypes.items():
        got = observed[name]
        if tuple(got.shape) != shapes[name]:
            return f"{name} has shape {list(got.shape)}, expected {list(shapes[name])}"
        if got.numel() == 0:
            return f"{name} is empty: nothing to judge"
        if str(got.dtype) != f"torch.{dtype}":
            return f"{name} has dtype {str(got.dtype).removeprefix('torch.')}, expected {dtype}"
    return None


def changed(before: Inputs, after: Mapping[str, torch.Tensor]) -> str | None:
    """The input that the subject wrote into, as a sentence, or None. NaN equals NaN here.

    Where the tensors lie in memory alike, the gaps between strides are compared too.
    """
    for name, x in before.items():
        y = after[name]
        if _laid_out(x) == _laid_out(y):
            x, y = memory(x), memory(y)
        if not torch.equal(_bits(x), _bits(y)):
            return f"the subject changed its input {name}"
    return None


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> str | None:
    """How two answers to the same question differ in any bit, as a sentence, or None."""
    for name, x in first.items():
        y = second.get(name)
        if y is None or x.shape != y.shape or not torch.equal(_bits(x), _bits(y)):
            return f"{name} differs between two calls with the same inputs"
    return None


def _laid_out(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes()


def _bits(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(kind)
