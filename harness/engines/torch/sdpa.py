"""torch.nn.functional.scaled_dot_product_attention by backend and mask form, and FlexAttention."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, bias, flex_attention, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

from cases.sdpa import SdpaCase
from harness.programs import sdpa as programs
from harness.subject import Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
LANES = ("cpu", "amx", "mps", "cuda")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
Attend = Callable[[SdpaCase, torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def _stepwise(attend: Attend) -> Callable[[SdpaCase, Tensors], Tensors]:
    """Call by call over the case's schedule, each with the keys that the cache holds by then."""

    def run(case: SdpaCase, t: Tensors) -> Tensors:
        outs = [
            attend(
                case,
                t["q"][:, :, start:end],
                t["k"][:, :, :keys],
                t["v"][:, :, :keys],
                _mask(case, t)[:, :, start:end, :keys],
            )
            for start, end, keys in case.steps()
        ]
        return {"out": torch.cat(outs, 2)}

    return run


def _mask(case: SdpaCase, t: Tensors) -> Any:
    """What is visible; with ALiBi, its bias in float32, which torch takes beside any dtype."""
    if case.alibi is None:
        return t["visible"]
    bias = -t["alibi"][:, None, None] * t["distance"]
    return bias.masked_fill(~t["visible"], -torch.inf)


def _pinned(backend: SDPBackend, mask: Callable[[Any, torch.dtype], Any] | None = None) -> Attend:
    def attend(case: SdpaCase, q: Any, k: Any, v: Any, visible: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask(visible, q.dtype) if mask else visible,
                scale=case.scale,
                enable_gqa=True,
            )

    return attend


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if visible.is_floating_point():
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        ~visible, -torch.inf
    )


def _is_causal(case: SdpaCase, q: Any, k: Any, v: Any, visible: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, scale=case.scale, enable_gqa=True
        )


def _square(case: SdpaCase) -> str | None:
    """torch's is_causal is aligned to the upper left: the contract only where q_len == kv_len."""
    if case.causal and case.q_len != case.kv_len:
        return "is_causal aligns to the upper left: q_len must equal kv_len"
    return None


def _lower_right(case: SdpaCase, q: Any, k: Any, v: Any, visible: Any) -> torch.Tensor:
    with _disable_current_modes():  # the bias is a tensor subclass, which a trace can't create
        mask = bias.causal_lower_right(q.shape[2], k.shape[2]) if case.causal else None
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=True)


def _short(case: SdpaCase) -> str | None:
    """torch warns of, and answers NaN for, rows that see nothing."""
    if case.causal and case.q_len > case.kv_len:
        return "causal_lower_right gives NaN for rows that see no key (documented in torch)"
    return None


def _flash_with_lse(case: SdpaCase, t: Tensors) -> Tensors:
    """The operator behind the flash backend, which also returns the log-sum-exp."""
    group = case.heads // case.kv_heads
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        t["q"],
        t["k"].repeat_interleave(group, 1),
        t["v"].repeat_interleave(group, 1),
        0.0,
        False,
        attn_mask=_additive(_mask(case, t), t["q"].dtype),
        scale=case.softmax_scale,
    )
    return {"out": out, **({"lse": lse} if case.lse else {})}


def _flex(call: Callable[..., Any]) -> Callable[[SdpaCase, Tensors], Tensors]:
    def run(case: SdpaCase, t: Tensors) -> Tensors:
        visible, cap = t["visible"][:, 0], case.softcap
        slopes, distance = t.get("alibi"), t.get("distance")

        def see(b: Any, h: Any, i: Any, j: Any) -> Any:
            return visible[b, i, j]

        def changed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None and distance is not None:
                score = score - slopes[h] * distance[b, 0, i, j]
            return score

        mask = flex_attention.create_block_mask(
            see, case.batch, None, case.q_len, case.kv_len, device=str(visible.device)
        )
        out = call(
            t["q"],
            t["k"],
            t["v"],
            score_mod=None if case.softcap is None and case.alibi is None else changed,
            block_mask=mask,
            scale=case.scale,
            enable_gqa=True,
            **({"return_aux": flex_attention.AuxRequest(lse=True)} if case.lse else {}),
        )
        if not case.lse:
            return {"out": out}
        return {"out": out[0], "lse": out[1].lse}

    return run


def _eager(*args: Any, **more: Any) -> Any:
    """Without this switch eager FlexAttention still traces anew for every shape, for seconds."""
    before = flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention.flex_attention(*args, **more)
    finally:
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention.flex_attention, dynamic=False)


def _compile_and_call(*args: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        # torch's own compiler, which imports what torch itself has deprecated
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        return _compiled()(*args, **more)


MATH = programs.program(programs.TORCH_MATH)
FLASH_PROGRAM = programs.program(programs.torch_flash())
FLEX = programs.program(programs.with_torch_matmul(programs.TORCH_FLEX))
MASKED = frozenset({"causal", "window", "scale", "kv_lens", "q_lens", "side", "layout", "schedule"})
ADDED = MASKED | {"alibi"}
PLAIN = frozenset({"causal", "scale", "layout"})

SUBJECTS = (
    Subject(
        name="torch.sdpa.math",
        run=_stepwise(_pinned(SDPBackend.MATH)),
        claims=ADDED,
        dtypes=DTYPES,
        lanes=LANES,
        programs={"cpu": MATH},
        kernels=("aten::_safe_softmax",),
    ),
    Subject(
        name="torch.sdpa.flash",
        run=_stepwise(_pinned(SDPBackend.FLASH_ATTENTION)),
        claims=MASKED,
        dtypes=DTYPES,
        lanes=("cpu", "amx"),
        programs={"cpu": FLASH_PROGRAM},
        kernels=(FLASH,),
    ),
    Subject(
        name="torch.sdpa.flash_additive_mask",
        run=_stepwise(_pinned(SDPBackend.FLASH_ATTENTION, _additive)),
        claims=ADDED,
        dtypes=DTYPES,
        lanes=("cpu", "amx"),
        programs={"cpu": FLASH_PROGRAM},
        kernels=(FLASH,),
    ),
    Subject(
        name="torch.sdpa.flash_lse",
        run=_flash_with_lse,
        claims=ADDED - {"schedule"} | {"lse"},
        dtypes=DTYPES,
        lanes=("cpu", "amx"),
        programs={"cpu": FLASH_PROGRAM},
        kernels=(FLASH,),
    ),
    Subject(
        name="torch.sdpa.is_causal",
        run=_stepwise(_is_causal),
        claims=PLAIN,
        dtypes=DTYPES,
        lanes=LANES,
        programs={"cpu": FLASH_PROGRAM},
        refusal=_square,
        kernels=(),
    ),
    Subject(
        name="torch.sdpa.causal_lower_right",
        run=_stepwise(_lower_right),
        claims=PLAIN | {"schedule"},
        dtypes=DTYPES,
        lanes=LANES,
        programs={"cpu": FLASH_PROGRAM},
        refusal=_short,
    ),
    Subject(
        name="torch.sdpa.flex_eager",
        run=_flex(_eager),
        claims=ADDED - {"schedule"} | {"softcap", "lse"},
        dtypes=DTYPES,
        lanes=LANES,
        programs={"cpu": FLEX},
    ),
    Subject(
        name="torch.sdpa.flex_compiled",
        run=_flex(_compile_and_call),
        claims=MASKED - {"schedule"} | {"softcap"},  # torch.compile on CPU knows no return_lse
        dtypes=("float32", "bfloat16"),
        lanes=("cpu", "cuda"),
        slow=True,
    ),
)
