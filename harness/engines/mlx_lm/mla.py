"""The latent attention of mlx-lm's DeepSeek models, with its caches, masks and scale."""

import functools
import math
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import deepseek_v2, deepseek_v3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache

from cases.mla import MlaCase
from harness.programs.mla import MlaArithmetic, Path
from harness.programs.sdpa import MLX
from harness.subject import Subject, Tensors

DTYPES = ("float32", "bfloat16", "float16")
CLAIMS = frozenset({"q_len", "kv_lens", "mscale", "layout", "schedule"})
FACTOR = 40.0
"""YaRN factor of the config; `mscale_all_dim` is chosen so that it gives the mscale asked for."""


class _Given:
    """Stands where the module has a projection and returns the case's tensor."""

    def __init__(self) -> None:
        self.answer: Any = None

    def __call__(self, hidden: mx.array) -> mx.array:
        del hidden
        return self.answer


def _as_it_is(x: mx.array, *args: Any) -> mx.array:
    """Stands for a normalisation, a rotation (whose offset it ignores) or `o_proj`."""
    del args
    return x


def _run(models: ModuleType, case: MlaCase, t: Tensors) -> Tensors:
    """Call by call: the module's own call on a cache that holds the prefix.

    Stand-ins give it the queries and latents where it would project a hidden state, normalise, and
    rotate. The prefix comes in by a call of its own, as a prompt does; its queries ask nothing.
    Shorter requests are padded on the left in a BatchKVCache; pad rows hold ordinary numbers.
    """
    module = _module(models, case, t)
    rows = _held(case, t)
    q = mx.concatenate([t["q_nope"], t["q_pe"]], -1).reshape(case.batch, case.q_len, -1)
    before = case.kv_len - case.q_len
    cache: Any = KVCache()
    if case.kv_lens is not None:
        cache = BatchKVCache([case.kv_len - k for k in case.kv_lens])
    if before:
        nothing = mx.zeros((case.batch, before, q.shape[-1]), dtype=q.dtype)
        _call(module, nothing, rows[:, :before], cache)
    outs, start = [], 0
    for count in case.schedule or (case.q_len,):
        end = start + count
        out = _call(module, q[:, start:end], rows[:, before + start : before + end], cache)
        outs.append(out.reshape(case.batch, count, case.heads, case.v_dim))
        start = end
    out = mx.concatenate(outs, 1)
    return {"out": out.reshape(case.batch * case.q_len, case.heads, case.v_dim)}


def _call(module: Any, q: mx.array, rows: mx.array, cache: Any) -> mx.array:
    module.q_proj.answer, module.kv_a_proj_with_mqa.answer = q, rows
    hidden = mx.zeros((*q.shape[:2], 1), dtype=q.dtype)
    mask = create_attention_mask(hidden, cache, return_array=True)
    return module(hidden, mask, cache)


def _held(case: MlaCase, t: Tensors) -> mx.array:
    """The rows of every request, new ones last, [B, kv_len, L + R]; in front, its oldest again."""
    new = mx.concatenate([t["latent"], t["k_pe"]], -1)
    new = new.reshape(case.batch, case.q_len, case.width)
    rows = []
    for b, length in enumerate(case.lengths()[1]):
        mine = mx.concatenate([t["cache"][t["table"][b, 0], : length - case.q_len], new[b]])
        padding = mx.repeat(mine[:1], case.kv_len - length, axis=0)
        rows.append(mx.concatenate([padding, mine]))
    return mx.stack(rows)


def _module(models: ModuleType, case: MlaCase, t: Tensors) -> Any:
    module = _built(
        models, case.heads, case.latent_dim, case.nope_dim, case.rope_dim, case.v_dim,
        case.mscale or 1.0,
    )  # fmt: skip
    w_uk, w_uv = t["w_uk"], t["w_uv"]
    if models is deepseek_v3:
        module.embed_q.weight = w_uk.swapaxes(1, 2)
        module.unembed_out.weight = w_uv.swapaxes(1, 2)
    else:
        both = mx.concatenate([w_uk, w_uv.swapaxes(1, 2)], 1)
        module.kv_b_proj.weight = both.reshape(-1, case.latent_dim)
    return module


@functools.lru_cache(maxsize=64)
def _built(
    models: Any, heads: int, latent: int, nope: int, rope: int, v_dim: int, mscale: float
) -> Any:
    args = models.ModelArgs(
        hidden_size=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v_dim,
        rope_scaling={
            "type": "yarn",
            "factor": FACTOR,
            "mscale": 1.0,
            "mscale_all_dim": (mscale - 1) / (0.1 * math.log(FACTOR)),
            "original_max_position_embeddings": 4096,
        },
    )
    kind = {deepseek_v2: "DeepseekV2Attention", deepseek_v3: "DeepseekV3Attention"}[models]
    module = getattr(models, kind)(args)
    module.q_proj, module.kv_a_proj_with_mqa = _Given(), _Given()
    module.kv_a_layernorm = module.rope = module.o_proj = _as_it_is
    return module


def _subject(models: ModuleType, path: Path) -> Subject:
    name = models.__name__.rsplit(".", 1)[-1]
    return Subject(
        name=f"mlx_lm.mla.{name}",
        run=functools.partial(_run, models),
        runtime="mlx",
        claims=CLAIMS,
        dtypes=DTYPES,
        lanes=("mps",),
        programs={"cpu": MlaArithmetic(path=path, attention=MLX, apart=models is deepseek_v3)},
        kernels=("mlx:{device}",),
    )


SUBJECTS = (
    # Absorbed where a call brings one token; keys and values of all heads are written out else.
    _subject(deepseek_v3, "by_length"),
    # The cache holds keys and values of all heads.
    _subject(deepseek_v2, "materialised"),
)
