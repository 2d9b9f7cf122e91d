"""mx.fast.scaled_dot_product_attention, by the form in which it is given its mask."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cases.sdpa import SdpaCase
from harness.programs import sdpa as programs
from harness.subject import Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
MASKED = frozenset(
    {"causal", "window", "scale", "kv_lens", "q_lens", "side", "layout", "schedule", "sinks"}
)
UNMASKED = frozenset({"causal", "scale", "layout", "schedule", "sinks"})


def _stepwise(mask: Callable[[SdpaCase, mx.array], Any]) -> Callable[[SdpaCase, Tensors], Tensors]:
    """Call by call over the case's schedule, each with the keys that the cache holds by then."""

    def run(case: SdpaCase, t: Tensors) -> Tensors:
        outs = [
            mx.fast.scaled_dot_product_attention(
                t["q"][:, :, start:end],
                t["k"][:, :, :keys],
                t["v"][:, :, :keys],
                scale=case.softmax_scale,
                mask=mask(case, t["visible"][:, :, start:end, :keys]),
                sinks=t.get("sinks"),
            )
            for start, end, keys in case.steps()
        ]
        return {"out": mx.concatenate(outs, axis=2)}

    return run


def _additive(case: SdpaCase, visible: mx.array) -> mx.array:
    dtype = getattr(mx, case.dtype)
    return mx.where(visible, mx.array(0, dtype), mx.array(-mx.inf, dtype))


def _no_dead_rows(case: SdpaCase) -> str | None:
    """-inf everywhere is no mask that MLX gives a meaning to: its softmax is 0 / 0."""
    if case.sinks is None and case.dead_rows:
        return "a row of nothing but -inf has no softmax; the bool mask is asked instead"
    return None


PROGRAMS = {"cpu": programs.program(programs.MLX)}

SUBJECTS = (
    Subject(
        name="mlx.sdpa.bool_mask",
        run=_stepwise(lambda case, visible: visible),
        runtime="mlx",
        claims=MASKED,
        dtypes=DTYPES,
        lanes=("mps",),
        programs=PROGRAMS,
        kernels=("mlx:{device}",),
    ),
    Subject(
        name="mlx.sdpa.additive_mask",
        run=_stepwise(_additive),
        runtime="mlx",
        claims=MASKED,
        dtypes=DTYPES,
        lanes=("mps",),
        programs=PROGRAMS,
        refusal=_no_dead_rows,
        kernels=("mlx:{device}",),
    ),
    Subject(
        name="mlx.sdpa.causal",
        run=_stepwise(lambda case, visible: "causal" if case.causal else None),
        runtime="mlx",
        claims=UNMASKED,
        dtypes=DTYPES,
        lanes=("mps",),
        programs=PROGRAMS,
        kernels=("mlx:{device}",),
    ),
)
