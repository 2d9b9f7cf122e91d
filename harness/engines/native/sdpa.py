"""Our own attention kernels as subjects: fused, plain and ragged decode, for torch and for MLX."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from cases.case import Inputs
from cases.sdpa import SdpaCase
from harness.arithmetic.exponential import Exp
from harness.arithmetic.midrad import MidRad, cat
from harness.arithmetic.mode import Mode
from harness.arithmetic.softmax import SoftmaxPV
from harness.engines.native.torch import sdpa as torch_kernels
from harness.programs import sdpa as programs
from harness.subject import Program, Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
FUSED = frozenset({"causal", "window", "scale", "kv_lens", "q_lens", "side", "layout", "schedule"})
PLAIN = FUSED | {"softcap", "sinks", "lse"}
DECODE = frozenset({"causal", "window", "scale", "kv_lens", "side", "layout", "softcap", "sinks"})
BIASED = frozenset({"alibi"})


def _lower_right(
    kernels: ModuleType, join: Callable[..., Any], path: str
) -> Callable[[SdpaCase, Tensors], Tensors]:
    """Call by call over the case's schedule, each with the keys that the cache holds by then."""

    def run(case: SdpaCase, t: Tensors) -> Tensors:
        steps: list[Tensors] = []
        for start, end, keys in case.steps():
            result = kernels.lower_right_sdpa(
                t["q"][:, :, start:end],
                t["k"][:, :, :keys],
                t["v"][:, :, :keys],
                causal=case.causal,
                window=case.window,
                softcap=case.softcap,
                sinks=t.get("sinks"),
                **_biased(case, t),
                scale=case.scale,
                q_lens=case.q_lens,
                kv_lens=case.kv_lens,
                side=case.side,
                return_lse=case.lse,
                path=path,
            )
            steps.append(dict(zip(("out", "lse"), result if case.lse else (result,), strict=False)))
        return {name: join([s[name] for s in steps], 2) for name in steps[0]}

    return run


def _decode(kernels: ModuleType, path: str) -> Callable[[SdpaCase, Tensors], Tensors]:
    """Each request's keys in a cache of its own, as in servers that keep one for each."""

    def run(case: SdpaCase, t: Tensors) -> Tensors:
        lens = case.kv_lens or (case.kv_len,) * case.batch
        if case.side == "right":
            held = [slice(0, length) for length in lens]
        else:
            held = [slice(case.kv_len - length, case.kv_len) for length in lens]
        out = kernels.ragged_decode(
            t["q"],
            [t["k"][b, :, kept] for b, kept in enumerate(held)],
            [t["v"][b, :, kept] for b, kept in enumerate(held)],
            window=case.window,
            softcap=case.softcap,
            sinks=t.get("sinks"),
            **_biased(case, t),
            scale=case.scale,
            path=path,
        )
        return {"out": out}

    return run


def _biased(case: SdpaCase, t: Tensors) -> Tensors:
    """The kernels for MLX have no ALiBi, nor such an argument."""
    return {} if case.alibi is None else {"alibi": t["alibi"]}


def _not_causal(case: SdpaCase) -> str | None:
    if not case.causal and case.q_len > 1:
        return "decode is causal: only a single query sees all keys"
    return None


def _as_called(program: Program) -> Program:
    """`program` step by step of a schedule, on the keys that are not cut off in front.

    For a kernel whose arithmetic depends on where in its row a key stands (torch's flash kernel
    treats the last few keys of a row otherwise than whole vectors of keys).
    """

    def run(case: SdpaCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        outs = []
        for start, end, keys in case.steps():
            first = 0
            if case.window is not None and case.kv_lens is None and case.q_lens is None:
                first = max(0, keys - (end - start) - case.window + 1)
            kept = slice(first, keys)
            step = replace(case, schedule=(), q_len=end - start, kv_len=keys - first)
            part = dict(inputs)
            part["q"] = inputs["q"][:, :, start:end]
            part["k"], part["v"] = (inputs[name][:, :, kept] for name in ("k", "v"))
            part["visible"] = inputs["visible"][:, :, start:end, kept]
            if case.alibi is not None:
                part["distance"] = inputs["distance"][:, :, start:end, kept]
            outs.append(program(step, part, mode))
        return {name: cat([out[name] for out in outs], dim=2) for name in outs[0]}

    return run


TORCH_FUSED = _as_called(programs.program(programs.torch_flash()))
TORCH_PLAIN = programs.program(
    programs.SdpaArithmetic(softmax=SoftmaxPV(exp=Exp(e0=1.5, flush=-103.0)))
)
"""The docstring of `native.torch.sdpa`: float32 from the scores to the one rounding of the output.

exp is torch's vector exp: 1.05 unit roundoffs measured on its own (NUMERICS 3.7), 1.7 in a kernel
with the rounding of s - max, which the program counts apart; it underflows gradually, to 0 at -104.
"""
MLX_FUSED = programs.program(programs.MLX)
MLX_PLAIN = programs.program(
    programs.SdpaArithmetic(softmax=SoftmaxPV(exp=programs.MLX.softmax.exp))
)
"""The docstring of `native.mlx.sdpa`, with the exp of MLX's CPU backend."""

SUBJECTS: tuple[Subject, ...] = (
    Subject(
        name="native.sdpa.torch_fused",
        run=_lower_right(torch_kernels, torch.cat, "fused"),
        claims=FUSED,
        dtypes=DTYPES,
        lanes=("cpu", "amx"),
        programs={"cpu": TORCH_FUSED},
        kernels=("aten::_scaled_dot_product_flash_attention_for_cpu",),
    ),
    Subject(
        name="native.sdpa.torch_plain",
        run=_lower_right(torch_kernels, torch.cat, "plain"),
        claims=PLAIN | BIASED,
        dtypes=DTYPES,
        lanes=("cpu", "amx", "mps", "cuda"),
        programs={"cpu": TORCH_PLAIN},
    ),
    # Which kernel torch takes on a GPU is torch's choice, by shape: no path proof, no program.
    Subject(
        name="native.sdpa.torch_auto",
        run=_lower_right(torch_kernels, torch.cat, "auto"),
        claims=PLAIN | BIASED,
        dtypes=DTYPES,
        lanes=("mps", "cuda"),
    ),
    Subject(
        name="native.sdpa.torch_decode",
        run=_decode(torch_kernels, "plain"),
        claims=DECODE | BIASED,
        dtypes=DTYPES,
        lanes=("cpu", "amx", "mps", "cuda"),
        programs={"cpu": TORCH_PLAIN},
        refusal=_not_causal,
    ),
)

if importlib.util.find_spec("mlx") is not None:
    import mlx.core as mx

    from harness.engines.native.mlx import sdpa as mlx_kernels

    SUBJECTS += (
        Subject(
            name="native.sdpa.mlx_fused",
            run=_lower_right(mlx_kernels, mx.concatenate, "fused"),
            runtime="mlx",
            claims=FUSED | {"sinks"},
            dtypes=DTYPES,
            lanes=("mps",),
            programs={"cpu": MLX_FUSED},
            kernels=("mlx:{device}",),
        ),
        Subject(
            name="native.sdpa.mlx_plain",
            run=_lower_right(mlx_kernels, mx.concatenate, "plain"),
            runtime="mlx",
            claims=PLAIN,
            dtypes=DTYPES,
            lanes=("mps",),
            programs={"cpu": MLX_PLAIN},
            kernels=("mlx:{device}",),
        ),
        Subject(
            name="native.sdpa.mlx_decode",
            run=_decode(mlx_kernels, "fused"),
            runtime="mlx",
            claims=DECODE - {"softcap"},
            dtypes=DTYPES,
            lanes=("mps",),
            programs={"cpu": MLX_FUSED},
            refusal=_not_causal,
            kernels=("mlx:{device}",),
        ),
    )
