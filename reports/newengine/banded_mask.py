"""Masks of acme."""

import torch

from cases.banded_mask import BandedMaskCase
from harness.subject import Subject, Tensors


def _mask(n: int, offset: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Put the package's own call in the place of this one."""
    row = torch.arange(offset, offset + n, device=device)[:, None]
    key = torch.arange(offset + n, device=device)[None]
    visible = key <= row
    return visible if window is None else visible & (key > row - window)


def _run(case: BandedMaskCase, t: Tensors) -> Tensors:
    return {"visible": _mask(case.n, case.offset, case.window, t["tokens"].device)}


SUBJECTS = (
    Subject(
        name="acme.banded_mask.mask",
        run=_run,
        claims=frozenset({"offset", "window"}),
        dtypes=("bool",),
        lanes=("cpu", "cuda"),
    ),
)
