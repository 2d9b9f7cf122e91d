"""Owns the packed form of a matrix for dot-product instructions: tiles of VNNI groups, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 16
"""Rows of a tile, and result columns per tile."""
GROUP_BYTES = 4
"""A group of neighbouring k that one instruction multiplies and adds: one 32-bit lane."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch of matrices `[batch, k, n]` in tiles, zeros where k or n is no multiple of a tile.

    tiles: `[batch, ceil(n / 16), ceil(k / depth), 16, 16 * group]`, contiguous, with
        tiles[i, t, s, r, group * c + j] = b[i, depth * s + group * r + j, 16 * t + c]
        where group is 1 for float32, 2 for 16-bit and 4 for 8-bit elements, and depth = 16 * group.
        A tile is 16 rows of 64 bytes: what an AMX tile register holds.
    k, n: the sizes of the matrices.
    """

    tiles: Tensor
    k: int
    n: int

    @property
    def batch(self) -> int:
        return self.tiles.shape[0]

    @property
    def group(self) -> int:
        return group(self.tiles.dtype)

    @property
    def depth(self) -> int:
        """How many k one tile spans."""
        return ROWS * self.group


def group(dtype: torch.dtype) -> int:
    """Elements of `dtype` in a 32-bit group.

    Raises:
        ValueError: no packed form for that dtype.
    """
    if dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"dtype={dtype} can't be packed; expected one of {names}")
    return GROUP_BYTES // dtype.itemsize


def pack(b: Tensor) -> Packed:
    """Pack `b` `[batch, k, n]`, of any strides. Done once per weight.

    Raises:
        ValueError: another number of axes, or a dtype without a packed form.
    """
    if b.ndim != 3:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected 3 axes: pass [batch, k, n]")
    width = group(b.dtype)
    batch, k, n = b.shape
    depths, columns = -(-k // (ROWS * width)), -(-n // ROWS)
    full = b.new_zeros(batch, depths * ROWS * width, columns * ROWS)
    full[:, :k, :n] = b
    tiles = full.view(batch, depths, ROWS, width, columns, ROWS).permute(0, 4, 1, 2, 5, 3)
    tiles = tiles.reshape(batch, columns, depths, ROWS, ROWS * width)
    return Packed(tiles=tiles.contiguous(), k=k, n=n)


def unpack(packed: Packed) -> Tensor:
    """The matrices `[batch, k, n]` that were packed."""
    batch, columns, depths = packed.tiles.shape[:3]
    full = packed.tiles.view(batch, columns, depths, ROWS, ROWS, packed.group)
    full = full.permute(0, 2, 3, 5, 1, 4).reshape(batch, depths * packed.depth, columns * ROWS)
    return full[:, : packed.k, : packed.n].contiguous()


def plain(tile: Tensor) -> Tensor:
    """One tile or more, `[..., 16, 16 * group]`, as ordinary matrices `[..., depth, 16]`."""
    width = group(tile.dtype)
    return tile.unflatten(-1, (ROWS, width)).transpose(-1, -2).flatten(-3, -2)
