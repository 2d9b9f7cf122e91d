"""vLLM's matrix product by oneDNN, as its CPU linear layers call it."""

import torch

from cases.bmm import BmmCase
from harness.engines.vllm import part
from harness.subject import Subject, Tensors


def _onednn_mm(case: BmmCase, t: Tensors) -> Tensors:
    """It multiplies by a matrix that was packed beforehand, so each batch has a handler."""
    ops = part("_custom_ops")
    outs = []
    for a, b in zip(t["a"], t["b"], strict=True):
        handler = ops.create_onednn_mm(b)
        outs.append(ops.onednn_mm(handler, a, None))
    return {"out": torch.stack(outs)}


SUBJECTS = (
    Subject(
        name="vllm.bmm.onednn_mm",
        run=_onednn_mm,
        claims=frozenset(),
        dtypes=("float32", "bfloat16"),
        kernels=("_C::onednn_mm",),
    ),
)
