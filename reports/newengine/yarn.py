"""Ropes of acme."""

import torch
from torch import Tensor

from cases.yarn import YarnCase
from harness.subject import Subject, Tensors


def _rope(x: Tensor, positions: Tensor, base: float, factor: float) -> Tensor:
    """Put the package's own call in the place of this one: halves rotated, in float64.

    x [batch, heads, len, head_dim], positions [batch, len].
    """
    pair = torch.arange(0, x.shape[-1], 2, device=x.device).double()
    table = base ** (-pair / x.shape[-1]) / factor
    angle = positions.double()[:, None, :, None] * table
    first, second = x.double().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _run(case: YarnCase, t: Tensors) -> Tensors:
    rope = case.rope
    q, k = (
        _rope(t[name], t[f"{name}_positions"], rope.base, rope.factor if case.linear else 1.0)
        for name in ("q", "k")
    )
    keys = k.float().repeat_interleave(case.heads // case.kv_heads, 1)
    out = {"logits": q.float() @ keys.mT * rope.softmax_scale}
    return out | ({"q": q, "k": k} if case.rotated else {})


SUBJECTS = (
    Subject(
        name="acme.yarn.rope",
        run=_run,
        claims=frozenset({"linear", "factor", "rotated", "old_names"}),
        dtypes=("float32", "bfloat16", "float16"),
        lanes=("cpu", "cuda"),
    ),
)
