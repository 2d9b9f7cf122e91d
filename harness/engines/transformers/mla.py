"""DeepSeek's attention modules of transformers, with their cache, masks and scale."""

import functools
import math
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, DynamicCache, masking_utils
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from cases.case import Inputs
from cases.mla import MlaCase
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import Mode
from harness.programs import sdpa as attention
from harness.programs.mla import MlaArithmetic
from harness.subject import Program, Subject, Tensors
from references.hf.given import Given
from references.mla import gather_rows

DTYPES = ("float32", "bfloat16", "float16")
LANES = ("cpu", "mps", "cuda")
CLAIMS = frozenset({"q_len", "kv_lens", "mscale", "layout", "schedule"})
FACTOR = 40.0
"""YaRN factor of the config; `mscale_all_dim` is chosen so that it gives the mscale asked for."""


def _run(model: str, implementation: str, case: MlaCase, t: Tensors) -> Tensors:
    """Call by call: the module's own forward on a DynamicCache that holds the prefix.

    Stand-ins give it the queries and latents where it would project a hidden state, normalise, and
    rotate (by angle 0). Shorter requests are padded on the left, as in batched generation; pad
    rows of the cache hold ordinary numbers, which a mask of transformers' own hides.
    """
    config, module = _module(model, implementation, case, t)
    rows = _held(case, t)
    latent, k_pe = rows.split((case.latent_dim, case.rope_dim), -1)
    before = case.kv_len - case.q_len
    cache = DynamicCache(config=config)
    if before:
        cache.update(latent[:, None, :before], _reordered(model, k_pe)[:, None, :before], 0)
    q = torch.cat([t["q_nope"], t["q_pe"]], -1).reshape(case.batch, case.q_len, -1)
    padding = None
    if case.kv_lens is not None:
        first = torch.tensor([case.kv_len - k for k in case.kv_lens], device=q.device)[:, None]
        padding = (torch.arange(case.kv_len, device=q.device) >= first).long()
    outs, start = [], 0
    for count in case.schedule or (case.q_len,):
        end = start + count
        module.q_proj.answer = q[:, start:end]
        module.kv_a_proj_with_mqa.answer = rows[:, before + start : before + end]
        hidden = q.new_zeros(case.batch, count, config.hidden_size)
        mask = masking_utils.create_causal_mask(
            config=config,
            inputs_embeds=hidden,
            attention_mask=None if padding is None else padding[:, : before + end],
            cache=cache,
        )
        out, _ = module(
            hidden_states=hidden,
            position_embeddings=_no_rotation(model, q, count, case.rope_dim),
            attention_mask=mask,
            cache=cache,
        )
        outs.append(out.unflatten(-1, (case.heads, case.v_dim)))
        start = end
    return {"out": torch.cat(outs, 1).flatten(0, 1)}


def _held(case: MlaCase, t: Tensors) -> torch.Tensor:
    """The rows of every request, new ones last, [B, kv_len, L + R]; in front, its oldest again."""
    new = torch.cat([t["latent"], t["k_pe"]], -1).unflatten(0, (case.batch, case.q_len))
    rows = []
    for b, length in enumerate(case.lengths()[1]):
        old = gather_rows(t["cache"], t["table"][b], length - case.q_len)
        mine = torch.cat([old, new[b]])
        rows.append(torch.cat([mine[:1].expand(case.kv_len - length, -1), mine]))
    return torch.stack(rows)


def _module(model: str, implementation: str, case: MlaCase, t: Tensors) -> tuple[Any, Any]:
    config, module = _built(
        model, implementation, case.heads, case.latent_dim, case.nope_dim, case.rope_dim,
        case.v_dim, case.mscale or 1.0,
    )  # fmt: skip
    both = torch.cat([t["w_uk"], t["w_uv"].mT], 1).reshape(-1, case.latent_dim)
    module.kv_b_proj.weight = nn.Parameter(both, requires_grad=False)
    return config, module


@functools.lru_cache(maxsize=64)
def _built(
    model: str,
    implementation: str,
    heads: int,
    latent: int,
    nope: int,
    rope: int,
    v_dim: int,
    mscale: float,
) -> tuple[Any, Any]:
    make: Any = {"v2": DeepseekV2Config, "v3": DeepseekV3Config}[model]
    config = make(
        hidden_size=heads,  # V2 wants a multiple of the heads
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
        q_lora_rank=None,
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v_dim,
        max_position_embeddings=int(4096 * FACTOR),
        rope_parameters={
            "rope_type": "yarn",
            "factor": FACTOR,
            "mscale_all_dim": (mscale - 1) / (0.1 * math.log(FACTOR)),
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0,
        },
        attn_implementation=implementation,
    )
    kind: Any = {"v2": DeepseekV2Attention, "v3": DeepseekV3Attention}[model]
    with torch.device("meta"):
        module = kind(config, layer_idx=0).eval()
    module.q_proj, module.kv_a_proj_with_mqa = Given(), Given()
    module.kv_a_layernorm, module.o_proj = nn.Identity(), nn.Identity()
    return config, module


def _no_rotation(model: str, like: torch.Tensor, tokens: int, rope: int) -> Any:
    if model == "v2":
        return torch.ones(1, tokens, rope // 2, dtype=torch.complex64, device=like.device)
    ones = like.new_ones(1, tokens, rope)
    return ones, torch.zeros_like(ones)


def _reordered(model: str, k_pe: torch.Tensor) -> torch.Tensor:
    """V3 rotates interleaved pairs and leaves them as two halves; cached rows stand like that."""
    return k_pe if model == "v2" else torch.cat([k_pe[..., 0::2], k_pe[..., 1::2]], -1)


def _even(model: str, case: MlaCase) -> str | None:
    if case.rope_dim % 2:
        return "rope_dim is odd: columns are rotated in pairs"
    if model == "v2" and case.dtype == "float32" and (case.nope_dim % 2 or case.latent_dim % 2):
        return "nope_dim or latent_dim is odd: rotated pairs are viewed as complex where they lie"
    if case.kv_lens is not None and min(case.kv_lens) < case.q_len:
        return "left padding: every request has q_len new tokens"
    return None


_on_torch = attention.with_torch_matmul
EAGER = MlaArithmetic(path="materialised", attention=_on_torch(attention.HF_EAGER))
_FLASH = MlaArithmetic(path="materialised", attention=attention.torch_flash(), left=True)
_MATH = MlaArithmetic(path="materialised", attention=_on_torch(attention.TORCH_MATH))


def _sdpa(case: MlaCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
    """torch's flash kernel takes one head size for keys and values; its math backend takes two."""
    chosen = _FLASH if case.nope_dim + case.rope_dim == case.v_dim else _MATH
    return chosen(case, inputs, mode)


def _subject(model: str, implementation: str, program: Program) -> Subject:
    return Subject(
        name=f"transformers.mla.deepseek_{model}_{implementation}",
        run=functools.partial(_run, model, implementation),
        claims=CLAIMS,
        dtypes=DTYPES,
        lanes=LANES,
        programs={"cpu": program},
        refusal=functools.partial(_even, model),
    )


SUBJECTS = (
    _subject("v2", "eager", EAGER),
    _subject("v3", "eager", EAGER),
    _subject("v3", "sdpa", _sdpa),
)
