"""Intel AMX's TDPBF16PS, emulated to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from .dot import Accumulate
from .formats import BF16, FP32, denormals_are_zero, round_to

TDPBF16PS = Accumulate(format=FP32, order="amx", exact_products=True, epilogue=0, flush=True)
"""How a tile product accumulates; its operands are read through `denormals_are_zero`."""

_TILE_DEPTH = 32


def _round_flush(x: Tensor) -> Tensor:
    """x rounded to float32, zero where that is tiny (FTZ).

    x86 finds tininess after rounding, to 24 bits with an unbounded exponent: from half a spacing
    below the smallest normal on, x is that number.
    """
    return round_to(x, FP32).masked_fill(x.abs() < FP32.min_normal * (1 - FP32.u / 2), 0.0)


def tile_product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., m, k] @ b [..., k, n], bfloat16 values, as float32 values held in float64.

    Intel SDM, TDPBF16PS: for each 32-deep slice two FMA chains, over even and over odd k, start
    at zero; their sum is added to the tile. Every result rounds to nearest even and flushes to
    zero; subnormal inputs read as zero; MXCSR plays no part.

    Float64 then float32 rounds as float32 alone would: for a double rounding to matter the sum
    must lie within 2^-53 of a float32 tie without being one. The smaller of the two addends
    then starts at half a spacing, 2^-24, and ends 15 bits (a product of bfloat16s) or 23 bits
    (the chain) below that: 2^-47 at the least, which float64 holds.
    """
    left = denormals_are_zero(a.to(torch.float64), BF16)
    right = denormals_are_zero(b.to(torch.float64), BF16)
    depth = left.shape[-1]
    tile = (left[..., :1] * right[..., :1, :]) * 0.0
    for start in range(0, depth, _TILE_DEPTH):
        chains = [torch.zeros_like(tile), torch.zeros_like(tile)]
        for k in range(start, min(start + _TILE_DEPTH, depth)):
            product = left[..., k : k + 1] * right[..., k : k + 1, :]
            chains[k & 1] = _round_flush(chains[k & 1] + product)
        tile = _round_flush(tile + _round_flush(chains[0] + chains[1]))
    return tile
