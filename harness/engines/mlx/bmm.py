"""mlx.core's matrix products: matmul, addmm, and quantized_matmul of exact weights."""

import mlx.core as mx

from cases.bmm import CODE_OF_ZERO, CODES_PER_SCALE, BmmCase
from harness.arithmetic.dot import Accumulate
from harness.programs.bmm import by_dtype
from harness.subject import Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = frozenset({"a_layout", "b_layout"})


def _matmul(case: BmmCase, tensors: Tensors) -> Tensors:
    return {"out": tensors["a"] @ tensors["b"]}


def _addmm(case: BmmCase, tensors: Tensors) -> Tensors:
    """Without an addend: beta = 0 and zeros."""
    a, b, c, beta = tensors["a"], tensors["b"], tensors.get("c"), case.beta
    if c is None:
        c, beta = mx.zeros((case.n,), dtype=a.dtype), 0.0
    return {"out": mx.addmm(c, a, b, alpha=case.alpha, beta=beta)}


def _quantized_matmul(case: BmmCase, tensors: Tensors) -> Tensors:
    """The weights scale * code + bias with bias = -128 * scale; k padded to whole groups."""
    a, codes, scales = tensors["a"], tensors["codes"], tensors["scales"]
    pad = [(0, 0), (0, 0), (0, -case.k % CODES_PER_SCALE)]
    out = mx.quantized_matmul(
        mx.pad(a, pad),
        mx.contiguous(mx.pad(codes, pad)).view(mx.uint32),
        scales,
        -CODE_OF_ZERO * scales,
        transpose=True,
        group_size=CODES_PER_SCALE,
        bits=8,
    )
    return {"out": out}


def _no_codes(case: BmmCase) -> str | None:
    return None if case.codes else "only weights given as codes survive quantisation exactly"


_CPU = {"cpu": by_dtype(Accumulate(order="any"))}

SUBJECTS = (
    Subject(
        name="mlx.bmm.matmul",
        run=_matmul,
        runtime="mlx",
        lanes=("mps",),
        claims=LAYOUTS,
        dtypes=DTYPES,
        programs=_CPU,
    ),
    Subject(
        name="mlx.bmm.addmm",
        run=_addmm,
        runtime="mlx",
        lanes=("mps",),
        claims=LAYOUTS | {"addend", "alpha", "beta"},
        dtypes=DTYPES,
        programs=_CPU,
    ),
    Subject(
        name="mlx.bmm.quantized_matmul",
        run=_quantized_matmul,
        runtime="mlx",
        lanes=("mps",),
        claims=frozenset({"a_layout", "codes"}),
        dtypes=DTYPES,
        refusal=_no_codes,
        programs=_CPU,
    ),
)
