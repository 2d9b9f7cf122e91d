"""Adapter for our packed bmm: the portable path, and AMX's tile instructions in software."""

import torch

from cases.bmm import FEATURES, BmmCase
from harness.arithmetic.dot import Accumulate
from harness.engines.native.torch.bmm import bmm
from harness.engines.native.torch.vnni import pack
from harness.programs.bmm import BmmArithmetic, by_dtype
from harness.subject import Subject, Tensors

CLAIMS = frozenset(FEATURES) - {"codes"}


def _run(path: str):
    def run(case: BmmCase, tensors: Tensors) -> Tensors:
        out = bmm(
            tensors["a"],
            pack(tensors["b"]),
            alpha=case.alpha,
            c=tensors.get("c"),
            beta=case.beta,
            out_dtype=torch.float32 if case.wide else None,
            path=path,
        )
        return {"out": out}

    return run


def _tiles(name: str, dtype: str, *, flush_inputs: bool) -> Subject:
    """A tile instruction: emulated wherever it runs, until there is a kernel that issues it.

    The epilogue runs in ordinary float32, which does not flush; declaring that it may costs less
    than the smallest normal.
    """
    arithmetic = BmmArithmetic(
        accumulate=Accumulate(order="amx", exact_products=True, epilogue=0, flush=True),
        flush_inputs=flush_inputs,
    )
    return Subject(
        name=f"native.bmm.{name}",
        run=_run("tiles"),
        claims=CLAIMS,
        dtypes=(dtype,),
        lanes=("amx",),
        programs={"cpu": arithmetic},
        kernels=(f"kernel_parity::{name}",),
        emulated=frozenset({"amx"}),
    )


SUBJECTS = (
    Subject(
        name="native.bmm.packed",
        run=_run("portable"),
        claims=CLAIMS,
        dtypes=("float32", "bfloat16", "float16", "int8"),
        lanes=("cpu", "mps", "cuda"),
        programs={"cpu": by_dtype(Accumulate(order="any"))},
    ),
    _tiles("tdpbf16ps", "bfloat16", flush_inputs=True),
    _tiles("tdpfp16ps", "float16", flush_inputs=False),
    _tiles("tdpbssd", "int8", flush_inputs=False),
)
