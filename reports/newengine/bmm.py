"""Batched matrix products of acme."""

import torch

from cases.bmm import BmmCase
from harness.subject import Subject, Tensors


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Put the package's own call in the place of this one: sums in float32."""
    return (a.float() @ b.float()).to(a.dtype)


def _run(case: BmmCase, t: Tensors) -> Tensors:
    return {"out": _product(t["a"], t["b"])}


SUBJECTS = (
    Subject(
        name="acme.bmm.product",
        run=_run,
        claims=frozenset({"a_layout", "b_layout"}),
        dtypes=("float32", "bfloat16", "float16"),
        lanes=("cpu", "cuda"),
    ),
)
