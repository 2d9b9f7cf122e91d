"""How a tensor lies in memory: the same values under other strides, poison in the gaps."""

import torch

NAMES = ("contiguous", "swapped", "sliced", "offset")
"""contiguous; `swapped`: [batch, len, heads, dim] memory; `sliced`: a window of longer rows;
`offset`: starts in the middle of a larger buffer (unaligned)."""


def lay_out(x: torch.Tensor, layout: str, poison: float) -> torch.Tensor:
    """`x` [batch, heads, len, dim], equal values, laid out as `layout`; gaps hold `poison`.

    Raises:
        ValueError: no such layout.
    """
    if layout == "contiguous":
        return x.contiguous()
    if layout == "swapped":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), poison, dtype=x.dtype)
        wide[..., 4:-4] = x
        return wide[..., 4:-4]
    if layout == "offset":
        flat = torch.full((x.numel() + 3,), poison, dtype=x.dtype)
        flat[3:] = x.reshape(-1)
        return flat[3:].view(x.shape)
    raise ValueError(f"layout={layout!r} is unknown; expected one of {', '.join(NAMES)}")


def memory(x: torch.Tensor) -> torch.Tensor:
    """All memory behind a tensor, in one dimension: the gaps between its strides, too. Shared."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
