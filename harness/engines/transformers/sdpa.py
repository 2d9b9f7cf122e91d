"""The attention functions that transformers' models call: eager of three models, sdpa, flex."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils
from transformers.integrations import flex_attention, sdpa_attention
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from cases.sdpa import SdpaCase
from harness.programs import sdpa as programs
from harness.subject import Program, Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
LANES = ("cpu", "mps", "cuda")
CLAIMS = frozenset({"causal", "window", "scale", "kv_lens", "q_lens", "side", "layout", "schedule"})
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
Mask = Callable[[SdpaCase, torch.Tensor, torch.Tensor], Any]


def _stepwise(
    attend: Callable[..., tuple[torch.Tensor, Any]], mask: Mask
) -> Callable[[SdpaCase, Tensors], Tensors]:
    """Call by call over the case's schedule, each with the keys that the cache holds by then.

    gpt-oss has sinks in every layer; a sink of -inf is none.
    """

    def run(case: SdpaCase, t: Tensors) -> Tensors:
        module = SimpleNamespace(
            num_key_value_groups=case.heads // case.kv_heads,
            head_dim=case.head_dim,
            sinks=t.get("sinks", _no_sinks(case, t["q"])),
            is_causal=True,
            training=False,
        )
        outs = []
        for start, end, keys in case.steps():
            q, visible = t["q"][:, :, start:end], t["visible"][:, :, start:end, :keys]
            out, _ = attend(
                module,
                q,
                t["k"][:, :, :keys],
                t["v"][:, :, :keys],
                mask(case, q, visible),
                scaling=case.softmax_scale,
                **({} if case.softcap is None else {"softcap": case.softcap}),
            )
            outs.append(out.transpose(1, 2))
        return {"out": torch.cat(outs, 2)}

    return run


def _no_sinks(case: SdpaCase, q: torch.Tensor) -> torch.Tensor:
    return torch.full((case.heads,), -torch.inf, dtype=q.dtype, device=q.device)


def _eager(case: SdpaCase, q: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`visible` as `eager_mask` puts it: 0, or the most negative finite number of the dtype."""
    return masking_utils.eager_mask(
        case.batch,
        q.shape[2],
        visible.shape[-1],
        mask_function=lambda batch, head, row, key: visible[batch, head, row, key],
        dtype=q.dtype,
        device=q.device,
    )


def _sdpa(case: SdpaCase, q: torch.Tensor, visible: torch.Tensor) -> torch.Tensor | None:
    """A prepared mask where there is padding, else what `sdpa_mask` makes, or leaves to the kernel.

    None is a promise: one query sees all keys, and as many queries as keys are causal.
    """
    if not case.causal or case.kv_lens or case.q_lens or case.q_len > case.kv_len:
        return visible
    if case.window is None:
        function = masking_utils.causal_mask_function
    else:
        function = masking_utils.sliding_window_causal_mask_function(case.window)
    return masking_utils.sdpa_mask(
        case.batch,
        q.shape[2],
        visible.shape[-1],
        q_offset=visible.shape[-1] - q.shape[2],
        mask_function=function,
        local_size=case.window,
        device=q.device,
    )


def _blocks(case: SdpaCase, q: torch.Tensor, visible: torch.Tensor) -> Any:
    return create_block_mask(
        lambda b, h, i, j: visible[b, 0, i, j],
        case.batch, None, q.shape[2], visible.shape[-1], device=str(q.device),
    )  # fmt: skip


def _flex_eager(*args: Any, **more: Any) -> tuple[torch.Tensor, Any]:
    """Without the compilation, which takes seconds for each shape and does not know all of them."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        # torch's own compiler, which torch.compile imports even where it then runs eagerly
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        return flex_attention.flex_attention_forward(*args, **more)


def _subject(name: str, attend: Any, mask: Mask, program: Program | None, **more: Any) -> Subject:
    return Subject(
        name=f"transformers.sdpa.{name}",
        run=_stepwise(attend, mask),
        dtypes=DTYPES,
        lanes=LANES,
        programs={} if program is None else {"cpu": program},
        **{"claims": CLAIMS, **more},
    )


_on_torch = programs.with_torch_matmul
EAGER = programs.program(_on_torch(programs.HF_EAGER))

SUBJECTS = (
    _subject("llama_eager", modeling_llama.eager_attention_forward, _eager, EAGER),
    _subject(
        "gemma2_eager",
        modeling_gemma2.eager_attention_forward,
        _eager,
        EAGER,
        claims=CLAIMS | {"softcap"},
    ),
    _subject(
        "gpt_oss_eager",
        modeling_gpt_oss.eager_attention_forward,
        _eager,
        programs.program(_on_torch(programs.HF_EAGER_SINKS)),
        claims=CLAIMS | {"sinks"},
    ),
    _subject(
        "sdpa",
        sdpa_attention.sdpa_attention_forward,
        _sdpa,
        programs.program(programs.torch_flash()),
    ),
    _subject(
        "flex_eager",
        _flex_eager,
        _blocks,
        programs.program(_on_torch(programs.TORCH_FLEX)),
        claims=CLAIMS - {"schedule"} | {"softcap"},
    ),
)
