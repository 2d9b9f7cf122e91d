"""The attention functions that transformers' models call: eager of five models, sdpa, flex."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils
from transformers.integrations import flex_attention, sdpa_attention
from transformers.models.bloom import modeling_bloom
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mpt import modeling_mpt

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


def _with_alibi(attend: Callable[..., torch.Tensor]) -> Callable[[SdpaCase, Tensors], Tensors]:
    """Likewise, of the models whose attention has a kv head for each query head."""

    def run(case: SdpaCase, t: Tensors) -> Tensors:
        group = case.heads // case.kv_heads
        k, v = (t[name].repeat_interleave(group, 1) for name in ("k", "v"))
        outs = [
            attend(
                case,
                t["q"][:, :, start:end],
                k[:, :, :keys],
                v[:, :, :keys],
                t["visible"][:, :, start:end, :keys],
                t.get("alibi"),
            )
            for start, end, keys in case.steps()
        ]
        return {"out": torch.cat(outs, 2)}

    return run


def _bloom(
    case: SdpaCase, q: Any, k: Any, v: Any, visible: Any, slopes: torch.Tensor | None
) -> torch.Tensor:
    """BloomAttention between its linear layers; the bias as `build_alibi_tensor` makes it."""
    batch, heads, q_len, keys = *q.shape[:3], k.shape[2]
    if slopes is None:
        slopes = torch.zeros(heads, device=q.device)
    position = torch.arange(keys)[None] - torch.tensor(case.first_keys)[:, None]
    bias = slopes[:, None] * position.clamp_min(0)[:, None].to(q.device)
    module: Any = SimpleNamespace(
        query_key_value=lambda x: x,
        _reshape=lambda x: (q, k, v),
        _merge_heads=lambda x: x.view(batch, heads, q_len, -1).transpose(1, 2).flatten(2),
        dense=lambda x: x,
        attention_dropout=lambda x: x,
        hidden_dropout=0.0,
        training=False,
        num_heads=heads,
        head_dim=q.shape[3],
        inv_norm_factor=case.softmax_scale,
        beta=1.0,
        layer_idx=0,
        pretraining_tp=1,
        slow_but_exact=False,
    )
    hidden = q.transpose(1, 2).flatten(2)
    out, _ = modeling_bloom.BloomAttention.forward(
        module,
        hidden,
        torch.zeros_like(hidden),
        bias.reshape(batch * heads, 1, keys).to(q.dtype),
        _eager(case, q, visible),
        layer_past=_held(k, v),
    )
    return out.view(batch, q_len, heads, -1).transpose(1, 2)


def _mpt(
    case: SdpaCase, q: Any, k: Any, v: Any, visible: Any, slopes: torch.Tensor | None
) -> torch.Tensor:
    """MptAttention between its linear layers; the bias as `build_mpt_alibi_tensor` makes it."""
    batch, heads, q_len, keys = *q.shape[:3], k.shape[2]
    position = torch.arange(1 - keys, 1, dtype=torch.int32, device=q.device)
    bias: Any = None if slopes is None else position * slopes[:, None, None]
    module: Any = SimpleNamespace(
        Wqkv=lambda x: torch.cat([x, x, x], -1),  # keys and values are those of the cache
        out_proj=lambda x: x,
        clip_qkv=None,
        n_heads=heads,
        head_dim=q.shape[3],
        softmax_scale=case.softmax_scale,
        attn_dropout_p=0.0,
        training=False,
        layer_idx=0,
    )
    out, _ = modeling_mpt.MptAttention.forward(
        module,
        q.transpose(1, 2).flatten(2),
        bias,
        _held(k, v),
        ~visible,
    )
    return out.view(batch, q_len, heads, -1).transpose(1, 2)


def _held(k: torch.Tensor, v: torch.Tensor) -> Any:
    """A cache that has the step's keys already."""
    return SimpleNamespace(update=lambda *_, **__: (k, v), get_seq_length=lambda: k.shape[2])


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


def _biased(name: str, attend: Callable[..., torch.Tensor]) -> Subject:
    return Subject(
        name=f"transformers.sdpa.{name}",
        run=_with_alibi(attend),
        claims=CLAIMS | {"alibi"},
        dtypes=DTYPES,
        lanes=LANES,
    )


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
    _biased("bloom_eager", _bloom),
    _biased("mpt_eager", _mpt),
)
