"""Attention of acme."""

import torch

from cases.sdpa import SdpaCase
from harness.subject import Subject, Tensors


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Put the package's own call in the place of this one: plain attention in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = (q.float() @ k.mT * scale).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).to(q.dtype)


def _run(case: SdpaCase, t: Tensors) -> Tensors:
    return {"out": _attention(t["q"], t["k"], t["v"], t["visible"], case.softmax_scale)}


SUBJECTS = (
    Subject(
        name="acme.sdpa.attention",
        run=_run,
        claims=frozenset({"causal", "window", "scale", "kv_lens", "q_lens", "side", "layout"}),
        dtypes=("float32", "bfloat16", "float16"),
        lanes=("cpu", "cuda"),
    ),
)
