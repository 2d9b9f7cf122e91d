"""Owns batched products with a packed matrix: bfloat16, float16, float32 and int8."""

from collections.abc import Callable

import torch
from torch import Tensor

from harness.engines.native.torch import tiles
from harness.engines.native.torch.vnni import ROWS, Packed, plain

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""accumulator `[..., rows, 16]`, tile of A, tile of B -> accumulator."""

SOFTWARE_TILES: dict[torch.dtype, Step] = {
    torch.bfloat16: tiles.tdpbf16ps,
    torch.float16: tiles.tdpfp16ps,
    torch.int8: tiles.tdpbssd,
}


def bmm(
    a: Tensor,
    b: Packed,
    *,
    alpha: float = 1.0,
    c: Tensor | None = None,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    path: str = "portable",
) -> Tensor:
    """`alpha * (a @ b) + beta * c`, `[batch, m, n]`, accumulated in float32 (int8: in int32).

    a: `[batch, m, k]`, of any strides, of b's dtype. c: broadcastable to the result; int8 takes
    int32 and no alpha or beta. alpha, beta and c are applied in float32, once, after the sum; then
    the result is rounded once to `out_dtype`: a's dtype by default (int8: int32), or float32.
    path: "portable" multiplies unpacked tiles with torch, on any device; "tiles" runs AMX's tile
    instructions in software, bit for bit (not float32). The summation order differs.

    No tail is special: packing pads B with zeros, and A's last tile is padded when it is read, so
    nothing beyond k is touched. int8 sums are exact for k < 2**17.

    Raises:
        ValueError: shapes, dtypes or a path that do not fit.
    """
    _check(a, b, alpha, c, beta, out_dtype, path)
    step = _portable if path == "portable" else SOFTWARE_TILES[a.dtype]
    integral = a.dtype == torch.int8
    total = _accumulated(a, b, torch.int32 if integral else torch.float32, step)
    if alpha != 1:
        total = total * alpha
    if c is not None and beta != 0:
        addend = c if integral else c.float()
        total = total + (addend if beta == 1 else addend * beta)
    return total if integral else total.to(out_dtype or a.dtype)


def _accumulated(a: Tensor, b: Packed, dtype: torch.dtype, step: Step) -> Tensor:
    """a @ b `[batch, m, n]`, 16 rows at a time over all columns, one tile of depth per step."""
    batch, m = a.shape[:2]
    out = a.new_empty(batch, m, b.n, dtype=dtype)
    full = m - m % ROWS
    blocks = [(0, full, ROWS)] if full else []
    blocks += [(full, m, m - full)] if full < m else []
    for start, end, rows in blocks:
        block = a[:, start:end].unflatten(1, (-1, rows)).unsqueeze(2)  # [batch, blocks, 1, rows, k]
        width = b.tiles.shape[1]
        total = a.new_zeros(batch, block.shape[1], width, rows, ROWS, dtype=dtype)
        for s in range(b.tiles.shape[2]):
            left = block[..., s * b.depth : (s + 1) * b.depth]
            short = b.depth - left.shape[-1]
            left = torch.nn.functional.pad(left, (0, short)) if short else left
            total = step(total, left, b.tiles[:, None, :, s])
        columns = total.movedim(2, 3).reshape(batch, end - start, width * ROWS)
        out[:, start:end] = columns[..., : b.n]
    return out


def _portable(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """One depth of tiles in float32; 64 int8 products are exact there."""
    product = left.float() @ plain(right).float()
    return total + (product.int() if total.dtype == torch.int32 else product)


def _check(
    a: Tensor,
    b: Packed,
    alpha: float,
    c: Tensor | None,
    beta: float,
    out_dtype: torch.dtype | None,
    path: str,
) -> None:
    if a.dtype != b.tiles.dtype:
        raise ValueError(f"a is {a.dtype}, b {b.tiles.dtype}: pass a in the dtype b was packed in")
    if a.ndim != 3 or a.shape[0] != b.batch or a.shape[2] != b.k or a.shape[1] == 0:
        raise ValueError(
            f"a has shape {tuple(a.shape)}, expected [{b.batch}, at least 1, {b.k}]: as many "
            "matrices as were packed, and their k"
        )
    integral = a.dtype == torch.int8
    if integral and (alpha != 1 or beta != 1):
        raise ValueError(f"alpha={alpha}, beta={beta} must be 1 for int8: scale the result instead")
    if integral and b.k >= 2**17:
        raise ValueError(f"k={b.k} must be below {2**17} for int8: int32 may overflow beyond")
    if c is not None and integral != (c.dtype == torch.int32):
        raise ValueError(f"c is {c.dtype}, expected int32 for int8 and floating point otherwise")
    results = (torch.int32,) if integral else (a.dtype, torch.float32)
    if out_dtype is not None and out_dtype not in results:
        raise ValueError(f"out_dtype={out_dtype}, expected one of {results}")
    if path not in ("portable", "tiles"):
        raise ValueError(f"path={path!r} is unknown; expected 'portable' or 'tiles'")
    if path == "tiles" and a.dtype not in SOFTWARE_TILES:
        raise ValueError(f"dtype={a.dtype} has no tile instruction; pass path='portable'")
