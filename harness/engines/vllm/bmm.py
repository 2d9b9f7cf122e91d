"""vLLM's matrix products on CPU: oneDNN's, as its linear layers call it, and AMX_MLA's bmm."""

from collections.abc import Callable

import torch

from cases.bmm import BmmCase, Claims
from harness.engines.vllm import part
from harness.subject import Subject, Tensors


def _onednn_mm(case: BmmCase, t: Tensors) -> Tensors:
    """It multiplies by a matrix that was packed beforehand, so each batch has a handler."""
    ops = part("_custom_ops")
    outs = [
        ops.onednn_mm(ops.create_onednn_mm(b), a, None) for a, b in zip(t["a"], t["b"], strict=True)
    ]
    return {"out": torch.stack(outs)}


def _bmm_cpu(packed: bool) -> Callable[[BmmCase, Tensors], Tensors]:
    """out[i] = a[i] @ weight[i]^T: the weight is [batch, n, k], as linear layers keep it."""

    def run(case: BmmCase, t: Tensors) -> Tensors:
        ops, weight = part("_custom_ops"), t["b"].mT.contiguous()
        if packed:
            weight = torch.ops._C.convert_weight_packed(weight)
        out = t["a"].new_empty(case.batch, case.m, case.n)
        ops.bmm_cpu(out, t["a"], weight, packed, None)
        return {"out": out}

    return run


DTYPES = (
    "float32",
    *(("bfloat16",) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ()),
    *(("float16",) if torch.ops.mkldnn._is_mkldnn_fp16_supported() else ()),
)
"""Those that oneDNN multiplies on this CPU; of others vLLM leaves a layer to torch."""

AMX = Claims((), multiple=32)
"""Both operators refuse (TORCH_CHECK) what is not whole tiles."""

SUBJECTS = (
    Subject(
        name="vllm.bmm.onednn_mm",
        run=_onednn_mm,
        claims=frozenset(),
        dtypes=DTYPES,
        kernels=("_C::onednn_mm",),
    ),
    Subject(
        name="vllm.bmm.bmm_cpu",
        run=_bmm_cpu(packed=False),
        claims=AMX,
        dtypes=("bfloat16",),
        lanes=("amx",),
        refusal=AMX.lacking,
        kernels=("_C::bmm_cpu",),
    ),
    Subject(
        name="vllm.bmm.bmm_cpu_packed",
        run=_bmm_cpu(packed=True),
        claims=AMX,
        dtypes=("bfloat16",),
        lanes=("amx",),
        refusal=AMX.lacking,
        kernels=("_C::bmm_cpu", "_C::convert_weight_packed"),
    ),
)
