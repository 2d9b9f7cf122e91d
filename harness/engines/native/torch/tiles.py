"""Owns AMX's tile products in software, bit for bit as the Intel SDM defines them, on any machine.

Each is registered as an operator of torch, so that a trace shows that it ran. A tile of A is
`[..., rows, depth]` with at most 16 rows, a tile of B `[..., 16, 16 * group]` in VNNI form, the
accumulator `[..., rows, 16]`; leading axes are batches of tiles.
"""

import torch
from torch import Tensor

from harness.engines.native.torch.vnni import ROWS, group, plain

_SMALLEST = 2.0**-126
"""The smallest normal float32."""
_FLUSHED = _SMALLEST * (1 - 2.0**-25)
"""Below this a result is tiny: rounded to 24 bits with an unbounded exponent it lies under 2**-126
(x86 finds tininess after rounding; at the tie, the even neighbour is 2**-126 itself)."""


@torch.library.custom_op("kernel_parity::tdpbf16ps", mutates_args=())
def tdpbf16ps(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c + a @ b in float32, of bfloat16 tiles.

    Two chains of fused multiply-adds per element, over even and odd k, each from zero; then their
    sum; then c plus that. Every result is rounded to nearest even and flushed to zero below
    2**-126 (FTZ), subnormal operands are zero (DAZ), whatever MXCSR says.
    """
    _check(c, a, b, torch.bfloat16)
    return _two_chains(c, _normal(a.double()), _normal(b.double()))


@torch.library.custom_op("kernel_parity::tdpfp16ps", mutates_args=())
def tdpfp16ps(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As `tdpbf16ps`, of float16 tiles, whose subnormals count: float32 holds them as normals."""
    _check(c, a, b, torch.float16)
    return _two_chains(c, a.double(), b.double())


@torch.library.custom_op("kernel_parity::tdpbssd", mutates_args=())
def tdpbssd(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c + a @ b in int32, of int8 tiles; like every dword addition it wraps around, in no case
    saturates."""
    _check(c, a, b, torch.int8)
    total = c.long() + (a.double() @ plain(b).double()).long()
    return (((total + 2**31) & (2**32 - 1)) - 2**31).int()


def _two_chains(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    pairs_a = a.unflatten(-1, (-1, 2)).movedim(-2, 0).unsqueeze(-2)  # [pairs, ..., rows, 1, 2]
    pairs_b = b.unflatten(-1, (ROWS, 2)).movedim(-3, 0).unsqueeze(-3)  # [pairs, ..., 1, 16, 2]
    chains = torch.zeros((), dtype=torch.float64, device=c.device)
    for left, right in zip(pairs_a, pairs_b, strict=False):
        chains = _add(chains, left * right)
    return _add(_normal(c.double()), _add(chains[..., 0], chains[..., 1])).float()


def _add(a: Tensor, b: Tensor) -> Tensor:
    """a + b rounded to float32 and flushed, as float64.

    a holds float32 values, b float32 values or products of 16-bit factors. To be rounded twice in
    a way that shows, the sum would have to lie next to the middle of two float32 values without
    being there. The half spacing, 2**-24 of the sum, then comes from the smaller term alone, which
    ends at most 23 bits below it: 2**-47, and float64 holds that.
    """
    total = a + b
    tiny = total.abs() < _FLUSHED
    return torch.where(tiny, torch.zeros_like(total).copysign(total), total.float().double())


def _normal(x: Tensor) -> Tensor:
    """Operands below 2**-126 read as zero of the same sign."""
    return torch.where(x.abs() < _SMALLEST, torch.zeros_like(x).copysign(x), x)


def _check(c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    depth, sums = ROWS * group(dtype), torch.int32 if dtype == torch.int8 else torch.float32
    if (c.dtype, a.dtype, b.dtype) != (sums, dtype, dtype):
        raise ValueError(f"tiles are {c.dtype}, {a.dtype}, {b.dtype}; expected {sums}, {dtype} x 2")
    rows = a.shape[-2]
    good = a.shape[-1] == depth and b.shape[-2:] == (ROWS, depth) and c.shape[-2:] == (rows, ROWS)
    if not good or not 1 <= rows <= ROWS:
        raise ValueError(
            f"tiles have shapes {tuple(c.shape)}, {tuple(a.shape)}, {tuple(b.shape)}; expected "
            f"[rows, {ROWS}], [rows, {depth}] and [{ROWS}, {depth}] with at most {ROWS} rows"
        )
