"""Owns the witness for matrix products: transformers' own linear layer, in float64."""

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D


def bmm(a: Tensor, b: Tensor, *, c: Tensor | None = None) -> Tensor:
    """`a @ b + c`, `[B, M, N]`, one of GPT-2's projections per batch entry.

    Arguments as for `references.bmm.bmm`; c is a row `[N]`, the bias.

    **Where transformers means something else**

    - Its models hold weights as `[N, K]` (`torch.nn.Linear`), but for GPT-2's Conv1D, which holds
      `[K, N]` like b here.
    - There is no alpha and no beta: a scale stands elsewhere in the model. Those are left to exact
      integer arithmetic in the tests.
    - No model of transformers multiplies int8 itself; its quantised models call other packages.
    """
    rows = []
    for left, right in zip(a, b, strict=True):
        layer = Conv1D(right.shape[1], right.shape[0])
        layer.weight = torch.nn.Parameter(right.double(), requires_grad=False)
        bias = torch.zeros(right.shape[1]) if c is None else c
        layer.bias = torch.nn.Parameter(bias.double(), requires_grad=False)
        rows.append(layer(left.double()))
    return torch.stack(rows)
