"""torch.bmm, torch.baddbmm and torch._int_mm, with oneDNN, without it, and on its AMX kernels."""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cases.bmm import BmmCase
from cases.case import Inputs
from harness.arithmetic.dot import Accumulate
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import Mode
from harness.programs.bmm import BmmArithmetic, by_dtype
from harness.subject import Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = frozenset({"a_layout", "b_layout"})
ADDEND = frozenset({"addend", "alpha", "beta"})
LANES = ("cpu", "mps", "cuda")
_AS_IT_IS: Any = None  # set_flags leaves alone what is None, but is annotated otherwise
_int_mm: Any = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
Run = Callable[[BmmCase, Tensors], Tensors]


def _bmm(case: BmmCase, tensors: Tensors) -> Tensors:
    return {"out": torch.bmm(tensors["a"], tensors["b"])}


def _bmm_out_dtype(case: BmmCase, tensors: Tensors) -> Tensors:
    wide = torch.float32 if case.wide else tensors["a"].dtype
    return {"out": torch.bmm(tensors["a"], tensors["b"], out_dtype=wide)}


def _baddbmm(case: BmmCase, tensors: Tensors) -> Tensors:
    """Without an addend: beta = 0, with which torch promises not to read what is passed."""
    a, b, c, beta = tensors["a"], tensors["b"], tensors.get("c"), case.beta
    if c is None:
        c, beta = torch.full((case.n,), torch.nan, dtype=a.dtype, device=a.device), 0
    return {"out": torch.baddbmm(c, a, b, alpha=case.alpha, beta=beta)}


def _int_mm_of_each(case: BmmCase, tensors: Tensors) -> Tensors:
    """It multiplies matrices, not batches of them."""
    pairs = zip(tensors["a"], tensors["b"], strict=True)
    return {"out": torch.stack([_int_mm(a, b) for a, b in pairs])}


def _int_mm_padded(case: BmmCase, tensors: Tensors) -> Tensors:
    """On CUDA it wants more than 16 rows, and n and k that are multiples of 8 (cuBLASLt)."""
    rows, depth, columns = max(17 - case.m, 0), -case.k % 8, -case.n % 8
    padded = {
        "a": torch.nn.functional.pad(tensors["a"], (0, depth, 0, rows)),
        "b": torch.nn.functional.pad(tensors["b"], (0, columns, 0, depth)),
    }
    return {"out": _int_mm_of_each(case, padded)["out"][:, : case.m, : case.n]}


def _no_onednn_shape(case: BmmCase) -> str | None:
    """Below 16**3 multiplications torch does not ask oneDNN."""
    return None if case.work > 16**3 else f"{case.work} multiplications are too few for oneDNN"


def _without_onednn(run: Run) -> Run:
    @functools.wraps(run)
    def plain(case: BmmCase, tensors: Tensors) -> Tensors:
        before = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=_AS_IT_IS)
        try:
            return run(case, tensors)
        finally:
            torch.backends.mkldnn.set_flags(_enabled=before[0], _fp32_precision=_AS_IT_IS)

    return plain


def _on_amx(run: Run) -> Run:
    @functools.wraps(run)
    def proven(case: BmmCase, tensors: Tensors) -> Tensors:
        _prove_amx(case.dtype)
        return run(case, tensors)

    return proven


@functools.cache
def _prove_amx(dtype: str) -> None:
    """Raise unless oneDNN multiplies matrices of `dtype` by AMX in this process.

    The dispatcher's trace ends at aten::bmm, so oneDNN itself is asked, once, what it ran. Its
    int8 gemm names no implementation: it takes AMX where oneDNN may use it at all, which the name
    of the bfloat16 kernel tells.
    """
    square = torch.ones(64, 64, dtype=getattr(torch, dtype))
    with _onednn_says() as said:
        _int_mm(square, square) if dtype == "int8" else torch.bmm(square[None], square[None])
    ran = [line for line in said if ",exec," in line]
    if any("amx" in line for line in ran):
        return
    if dtype == "int8" and any("gemm_api" in line and "src_s8" in line for line in ran):
        _prove_amx("bfloat16")
        return
    raise RuntimeError(
        f"oneDNN does not use AMX for {dtype}: {''.join(ran) or 'it did not run'}; unset "
        "ONEDNN_MAX_CPU_ISA, or leave the amx lane out"
    )


@contextmanager
def _onednn_says() -> Iterator[list[str]]:
    """oneDNN's verbose output, which it writes to the process's standard output; filled at exit."""
    said: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                yield said
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            said.extend(file.readlines())


_ONEDNN_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
_ANY = Accumulate(order="any")
# oneDNN's bfloat16 is VDPBF16PS or TDPBF16PS: both flush results and read subnormals as zero.
_FLUSHING = BmmArithmetic(
    accumulate=Accumulate(order="any", exact_products=True, flush=True), flush_inputs=True
)
_PLAIN = {"cpu": by_dtype(_ANY)}


def _default(case: BmmCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
    """oneDNN's bfloat16 where torch asks it."""
    if case.dtype == "bfloat16" and _ONEDNN_BF16 and _no_onednn_shape(case) is None:
        return _FLUSHING(case, inputs, mode)
    return _PLAIN["cpu"](case, inputs, mode)


_DEFAULT = {"cpu": _default}


def _pair(name: str, run: Run, **fields) -> tuple[Subject, Subject]:
    """The call as users have it, and with oneDNN switched off."""
    return (
        Subject(name=f"torch.bmm.{name}", run=run, programs=_DEFAULT, **fields),
        Subject(
            name=f"torch.bmm.{name}_no_onednn",
            run=_without_onednn(run),
            programs=_PLAIN,
            **{**fields, "lanes": ("cpu",)},
        ),
    )


SUBJECTS = (
    *_pair("bmm", _bmm, claims=LAYOUTS, dtypes=DTYPES, lanes=LANES, kernels=("aten::bmm",)),
    *_pair(
        "baddbmm",
        _baddbmm,
        claims=LAYOUTS | ADDEND,
        dtypes=DTYPES,
        lanes=LANES,
        kernels=("aten::baddbmm",),
    ),
    *_pair(
        "int_mm",
        _int_mm_of_each,
        claims=LAYOUTS,
        dtypes=("int8",),
        lanes=("cpu",),
        kernels=("aten::_int_mm",),
    ),
    Subject(
        name="torch.bmm.int_mm_padded",
        run=_int_mm_padded,
        claims=LAYOUTS,
        dtypes=("int8",),
        lanes=("cuda",),
        kernels=("aten::_int_mm",),
    ),
    Subject(
        name="torch.bmm.bmm_out_dtype",
        run=_bmm_out_dtype,
        claims=LAYOUTS | {"wide"},
        dtypes=("bfloat16", "float16"),
        lanes=("cuda",),
        kernels=("aten::bmm",),
    ),
    Subject(
        name="torch.bmm.bmm_onednn",
        run=_on_amx(_bmm),
        claims=LAYOUTS,
        dtypes=("bfloat16",),
        lanes=("amx",),
        programs={"cpu": _FLUSHING},
        refusal=_no_onednn_shape,
        kernels=("aten::bmm",),
    ),
    Subject(
        name="torch.bmm.int_mm_onednn",
        run=_on_amx(_int_mm_of_each),
        claims=LAYOUTS,
        dtypes=("int8",),
        lanes=("amx",),
        programs={"cpu": _FLUSHING},
        kernels=("aten::_int_mm",),
    ),
)
