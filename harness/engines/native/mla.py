"""Our own latent attention as subjects: decode and extend over a paged cache, torch and MLX."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from cases.mla import FEATURES, MlaCase, Step
from harness.arithmetic.dot import Accumulate
from harness.arithmetic.exponential import Exp
from harness.arithmetic.softmax import SoftmaxPV
from harness.engines.native.torch import mla as torch_kernels
from harness.programs.mla import MlaArithmetic
from harness.programs.sdpa import MLX, SdpaArithmetic, with_torch_matmul
from harness.subject import Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
EXTEND = frozenset(FEATURES)
DECODE = EXTEND - {"q_len", "schedule"}

Attend = Callable[[MlaCase, Step, Any, Any, Any, Any], tuple[Any, Any]]
Write = Callable[[Any, Any, Any, Any], Any]


def _whole(
    kernels: ModuleType, join: Callable[..., Any], copy: Callable[[Any], Any], attend: Attend
) -> Callable[[MlaCase, Tensors], Tensors]:
    """Write, absorb, attend and project, call by call over the case's schedule."""

    def run(case: MlaCase, t: Tensors) -> Tensors:
        cache = copy(t["cache"])
        steps: list[Tensors] = []
        for step in case.steps():
            mine = slice(step.tokens[0], step.tokens[-1] + 1)
            index: Any = mine if len(step.tokens) == mine.stop - mine.start else list(step.tokens)
            q_nope, q_pe, latent, k_pe, slots = (
                _rows(t[name], index) for name in ("q_nope", "q_pe", "latent", "k_pe", "slots")
            )
            written = kernels.write_cache(cache, latent, k_pe, slots)
            cache = cache if written is None else written
            q_latent = kernels.absorb(q_nope, t["w_uk"])
            o_latent, lse = attend(case, step, q_latent, q_pe, cache, t["table"])
            out = kernels.project_out(o_latent, t["w_uv"])
            steps.append({"q_latent": q_latent, "o_latent": o_latent, "lse": lse, "out": out})
        names = [name for name in case.output_dtypes() if name != "cache"]
        back = _order(case)
        found = {name: _rows(join([s[name] for s in steps], 0), back) for name in names}
        return {**found, **({"cache": cache} if case.stages else {})}

    return run


def _order(case: MlaCase) -> Any:
    """Where each packed row stands among the rows of all calls put one after the other."""
    called = [token for step in case.steps() for token in step.tokens]
    if called == sorted(called):
        return slice(None)
    return sorted(range(len(called)), key=called.__getitem__)


def _rows(x: Any, index: Any) -> Any:
    if isinstance(index, slice):
        return x[index]
    if isinstance(x, torch.Tensor):
        return x[torch.tensor(index, device=x.device)]
    import mlx.core as mx

    return x[mx.array(index)]


def _extend(kernels: ModuleType) -> Attend:
    def attend(
        case: MlaCase, step: Step, q_latent: Any, q_pe: Any, cache: Any, table: Any
    ) -> tuple[Any, Any]:
        return kernels.extend(
            q_latent, q_pe, cache, table, list(step.q_lens), list(step.kv_lens),
            scale=case.softmax_scale, splits=case.splits,
        )  # fmt: skip

    return attend


def _decode(
    kernels: ModuleType, numbers: Callable[[list[int], Any], Any], join: Callable[..., Any]
) -> Attend:
    """Requests that bring no token are left out of the call, and so is padding."""

    def attend(
        case: MlaCase, step: Step, q_latent: Any, q_pe: Any, cache: Any, table: Any
    ) -> tuple[Any, Any]:
        at = [b for b, count in enumerate(step.q_lens) if count]
        o_latent, lse = kernels.decode(
            q_latent[: len(at)],
            q_pe[: len(at)],
            cache,
            _rows(table, at),
            numbers([step.kv_lens[b] for b in at], table),
            scale=case.softmax_scale,
            splits=case.splits,
        )
        if rest := len(step.tokens) - len(at):  # padding has no answer: any row stands for it
            o_latent = join([o_latent, *[o_latent[:1]] * rest], 0)
            lse = join([lse, *[lse[:1]] * rest], 0)
        return o_latent, lse

    return attend


_ANY = Accumulate(order="any")
TORCH = MlaArithmetic(
    attention=with_torch_matmul(SdpaArithmetic(softmax=SoftmaxPV(exp=Exp(e0=1.5, flush=-103.0)))),
    project=_ANY,
)
"""The docstrings of `native.torch.mla`; exp is torch's vector exp, as in `native.sdpa`."""
MLX_PLAIN = replace(TORCH, attention=SdpaArithmetic(softmax=SoftmaxPV(exp=MLX.softmax.exp)))
"""The docstrings of `native.mlx.mla`, with the exp of MLX's CPU backend."""


def _counts(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        name="native.mla.torch_decode",
        run=_whole(
            torch_kernels, torch.cat, torch.clone, _decode(torch_kernels, _counts, torch.cat)
        ),
        claims=DECODE,
        dtypes=DTYPES,
        lanes=("cpu", "amx", "mps", "cuda"),
        programs={"cpu": TORCH},
    ),
    Subject(
        name="native.mla.torch_extend",
        run=_whole(torch_kernels, torch.cat, torch.clone, _extend(torch_kernels)),
        claims=EXTEND,
        dtypes=DTYPES,
        lanes=("cpu", "amx", "mps", "cuda"),
        programs={"cpu": TORCH},
    ),
)

if importlib.util.find_spec("mlx") is not None:
    import mlx.core as mx

    from harness.engines.native.mlx import mla as mlx_kernels

    SUBJECTS += (
        Subject(
            name="native.mla.mlx_decode",
            run=_whole(
                mlx_kernels,
                mx.concatenate,
                mx.array,
                _decode(mlx_kernels, lambda values, like: mx.array(values), mx.concatenate),
            ),
            runtime="mlx",
            claims=DECODE,
            dtypes=DTYPES,
            lanes=("mps",),
            programs={"cpu": MLX_PLAIN},
            kernels=("mlx:{device}",),
        ),
        Subject(
            name="native.mla.mlx_extend",
            run=_whole(mlx_kernels, mx.concatenate, mx.array, _extend(mlx_kernels)),
            runtime="mlx",
            claims=EXTEND,
            dtypes=DTYPES,
            lanes=("mps",),
            programs={"cpu": MLX_PLAIN},
            kernels=("mlx:{device}",),
        ),
    )
