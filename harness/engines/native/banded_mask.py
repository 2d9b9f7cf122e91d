"""Our own masks as subjects, for torch and for MLX."""

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from cases.banded_mask import BandedMaskCase
from harness.engines.native.torch import banded_mask as torch_kernels
from harness.subject import Subject, Tensors

CLAIMS = frozenset({"offset", "window", "left_padding", "right_padding"})


def _mask(
    kernels: ModuleType, place: Callable[[Tensors], dict[str, Any]]
) -> Callable[[BandedMaskCase, Tensors], Tensors]:
    def run(case: BandedMaskCase, t: Tensors) -> Tensors:
        visible = kernels.banded_mask(
            case.n,
            case.offset,
            window=case.window,
            left_padding=case.left_padding,
            right_padding=case.right_padding,
            **place(t),
        )
        # A padded batch's mask comes with a head axis, which the case has not.
        return {"visible": visible if case.batch is None else visible[:, 0]}

    return run


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        name="native.banded_mask.torch",
        run=_mask(torch_kernels, lambda t: {"device": t["tokens"].device}),
        claims=CLAIMS,
        dtypes=("bool",),
        lanes=("cpu", "mps", "cuda"),
    ),
)

if importlib.util.find_spec("mlx") is not None:
    from harness.engines.native.mlx import banded_mask as mlx_kernels

    SUBJECTS += (
        Subject(
            name="native.banded_mask.mlx",
            run=_mask(mlx_kernels, lambda t: {}),
            runtime="mlx",
            claims=CLAIMS,
            dtypes=("bool",),
            lanes=("mps",),
            kernels=("mlx:{device}",),
        ),
    )
