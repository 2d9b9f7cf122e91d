"""Wrong roundings that the ops share."""

import torch
from torch import Tensor

SHORT = ("bfloat16", "float16")
"""Formats that are narrower than what is computed in."""


def nearest(x: Tensor, dtype: str) -> Tensor:
    """Float64 `x` as `dtype` holds it, rounded by way of float32 as kernels do; float64."""
    return x.float().to(getattr(torch, dtype)).double()


def truncated(x: Tensor, dtype: str) -> Tensor:
    """Float64 `x` with the bits cut off that a 16-bit `dtype` does not hold; float64."""
    near = x.float().to(getattr(torch, dtype))
    beyond = (near.double().abs() > x.abs()) & near.isfinite()
    return (near.view(torch.int16) - beyond.short()).view(near.dtype).double()
