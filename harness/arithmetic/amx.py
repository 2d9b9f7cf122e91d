"""Intel AMX's TDPBF16PS, emulated to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from .dot import Accumulate
from .formats import BF16, FP32, Format, round_to

TDPBF16PS = Accumulate(format=FP32, order="amx", exact_products=True, epilogue=0, flush=True)
"""How a tile product accumulates; its operands are read through `denormals_are_zero`."""

_TILE_DEPTH = 32


def denormals_are_zero(x: Tensor, fmt: Format) -> Tensor:
    """Values below the smallest normal of `fmt` read as zero (DAZ)."""
    return x.masked_fill(x.abs() < fmt.min_normal, 0.0)


def _round_flush(x: Tensor) -> Tensor:
    return denormals_are_zero(round_to(x, FP32), FP32)


def tile_product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., m, k] @ b [..., k, n], bfloat16 values, as float32 values held in float64.

    Intel SDM, TDPBF16PS: for each 32-deep slice two FMA chains, over even and over odd k, start
    at zero; their sum is added to the tile. Every result rounds to nearest even and flushes to
    zero; subnormal inputs read as zero; MXCSR plays no part.

    A bfloat16 product (16 bits) plus a float32 (24 bits) may need more than float64's 53 bits;
    the sum is then split by TwoSum and made odd, so that the second rounding is innocuous
    (Boldo & Melquiond 2008).
    """
    left = denormals_are_zero(a.to(torch.float64), BF16)
    right = denormals_are_zero(b.to(torch.float64), BF16)
    depth = left.shape[-1]
    tile = (left[..., :1] * right[..., :1, :]) * 0.0
    for start in range(0, depth, _TILE_DEPTH):
        chains = [torch.zeros_like(tile), torch.zeros_like(tile)]
        for k in range(start, min(start + _TILE_DEPTH, depth)):
            product = left[..., k : k + 1] * right[..., k : k + 1, :]
            chains[k & 1] = _round_flush(_sum_to_odd(chains[k & 1], product))
        tile = _round_flush(_sum_to_odd(tile, _round_flush(_sum_to_odd(chains[0], chains[1]))))
    return tile


def _sum_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b rounded to odd in float64: truncated, with the last bit set when inexact."""
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    # Round to nearest went away from zero where the error points back: step to the truncation.
    bits = total.view(torch.int64)
    overshot = (error != 0) & ((error > 0) != (total > 0))
    odd = torch.where(overshot, bits - 1, bits) | (error != 0).to(torch.int64)
    return torch.where(total.isfinite(), odd.view(torch.float64), total)
