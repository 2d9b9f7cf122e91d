"""What a repro script does with an answer. Its source goes into the script: torch and no more."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """One output: what the reference says, and between which values a right kernel answers.

    dtype: torch's name. low, high: float64; NaN where an element has no meaning.
    """

    dtype: str
    expected: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def main(
    call: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
    inputs: dict[str, torch.Tensor],
    allowed: dict[str, Allowed],
    fault: str,
) -> int:
    """Print observed, expected and the fault; 1 when the answer is wrong, else 0.

    call: asks once; the answer, and the inputs as they are afterwards, both on the CPU.
    """
    first, after = call()
    again, _ = call()
    said = [line for name, right in allowed.items() for line in wrong(name, first, right)]
    said += [f"the call changed its input {n}" for n, x in inputs.items() if not same(x, after[n])]
    said += [
        f"{name} differs between two calls with the same inputs"
        for name in allowed
        if name in first and not same(first[name], again[name])
    ]
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}")
    if not said:
        print("every element is right")
        return 0
    if fault:
        print(f"fault: {fault}")
    print("\n".join(said))
    return 1


def wrong(name: str, answer: dict[str, Any], right: Allowed) -> list[str]:
    """What is wrong with one output: a sentence, and its worst element."""
    got = answer.get(name)
    if not isinstance(got, torch.Tensor):
        return [f"output {name} is {type(got).__name__}, expected a tensor"]
    if got.shape != right.low.shape:
        return [f"{name} has shape {list(got.shape)}, expected {list(right.low.shape)}"]
    if str(got.dtype) != f"torch.{right.dtype}":
        return [f"{name} has dtype {got.dtype}, expected torch.{right.dtype}"]
    seen = got.double()
    bad = ~((right.low <= seen) & (seen <= right.high)) & ~right.low.isnan()
    if not bool(bad.any()):
        return []
    off = torch.where(bad, (seen - right.expected).abs().nan_to_num(torch.inf, torch.inf), -1.0)
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), got.shape))
    return [
        f"{name}: {int(bad.sum())} of {got.numel()} elements are wrong, most of all {list(at)}",
        f"  observed {got[at].item()!r}",
        f"  expected {right.expected[at].item():.9g}, "
        f"allowed {right.low[at].item():.9g} to {right.high[at].item():.9g}",
    ]


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals NaN."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))
