"""vLLM's latent attention on CPU: its reference backend CPU_MLA, and the kernels of AMX_MLA.

`merge_attn_states` is plain torch here: its kernel is in no build for CPUs.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from cases.mla import Claims, MlaCase
from harness.engines.vllm import part
from harness.subject import Subject, Tensors

DEEPSEEK = ((512, 64, 128, 128), (512, 64, 192, 256))
DECODE = frozenset({"kv_lens", "mscale", "padding", "poison", "layout", "stages"})
EXTEND = DECODE - {"padding"} | {"q_len", "q_lens"}


def _answer(
    case: MlaCase, q_latent: torch.Tensor, o_latent: torch.Tensor, out: torch.Tensor, cache: Any
) -> Tensors:
    """Rows of requests with zeros for the padding below them; stages where they are asked for."""
    shown = {"q_latent": q_latent, "o_latent": o_latent} if case.stages else {}
    found = {"out": out, **shown}
    if case.padding:
        found = {
            name: torch.cat([x, x.new_zeros(case.padding, *x.shape[1:])])
            for name, x in found.items()
        }
    return {**found, **({"cache": cache} if case.stages else {})}


def _cpu_mla(case: MlaCase, t: Tensors) -> Tensors:
    """CPUMLAImpl as MLAAttention calls it: cache update, absorb, forward_mqa, up-projection.

    The two products around it are torch's, as in MLAAttention.forward_impl on CPU.
    """
    layer = _implementation(case)
    cache = t["cache"].clone()
    layer.do_kv_cache_update(
        t["latent"], t["k_pe"][:, None], cache, t["slots"], "auto", torch.ones(())
    )
    rows = slice(case.tokens)
    q_nope, q_pe = t["q_nope"][rows], t["q_pe"][rows]
    q_latent = torch.bmm(q_nope.transpose(0, 1), t["w_uk"]).transpose(0, 1)
    metadata = SimpleNamespace(
        decode=SimpleNamespace(block_table=t["table"], seq_lens=_seq_lens(case))
    )
    o_latent, _ = layer.forward_mqa((q_latent, q_pe), cache, metadata, None)
    out = torch.bmm(o_latent.transpose(0, 1), t["w_uv"]).transpose(0, 1)
    return _answer(case, q_latent, o_latent, out, cache)


def _prefill(case: MlaCase, t: Tensors) -> Tensors:
    """CPU_MLA's forward_mha: new tokens over themselves, and over their prefixes chunk by chunk.

    The prefixes are gathered from their pages into a workspace that takes a part of them at a time,
    of whole pages, and what the parts say is merged with merge_attn_states. (Its server keeps
    chunked prefill and prefix caching off, so that there are no prefixes; the code for them is.)
    """
    common = part("model_executor.layers.attention.mla_attention")
    layer = _implementation(case)
    layer.kv_b_proj = _Projection(torch.cat([t["w_uk"], t["w_uv"].mT], 1).flatten(0, 1))
    cache = t["cache"].clone()
    layer.do_kv_cache_update(
        t["latent"], t["k_pe"][:, None], cache, t["slots"], "auto", torch.ones(())
    )
    lens, keys = (torch.tensor(x, dtype=torch.int32) for x in case.lengths())
    start = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    size = cache.shape[1]
    room = -(-int((keys - lens).sum()) // (case.splits * size)) * size or size
    prefill = common.MLACommonPrefillMetadata(
        block_table=t["table"],
        query_start_loc=start,
        max_query_len=int(lens.max()),
        chunked_context=common.build_mla_chunked_context_metadata(
            context_lens_cpu=keys - lens,
            prefill_query_start_loc_cpu=start,
            chunked_prefill_workspace=cache.new_empty(room, case.width),
            chunked_prefill_workspace_size=room,
            block_size=size,
            align_chunk_to_block=True,
            device=torch.device("cpu"),
            dcp_world_size=1,
            dcp_local_block_size=1,
            dcp_virtual_block_size=1,
        ),
        q_data_type=cache.dtype,
        output_dtype=cache.dtype,
        prefill_backend=_backend(case),
    )
    prefill.prefill_backend.prepare_metadata(prefill)
    out = cache.new_empty(case.tokens, case.heads * case.v_dim)
    layer.forward_mha(
        torch.cat([t["q_nope"], t["q_pe"]], -1), t["latent"], t["k_pe"][:, None], cache,
        SimpleNamespace(prefill=prefill), torch.ones(()), out,
    )  # fmt: skip
    return {"out": out.view(case.tokens, case.heads, case.v_dim)}


class _Projection:
    """kv_b_proj without its layer: vLLM's linear layers return a bias beside the product."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


def _backend(case: MlaCase) -> Any:
    """The prefill backend that the platform chooses, CPU_SDPA_MLA."""
    return part("platforms").current_platform.get_mla_prefill_backend_cls(None)(
        num_heads=case.heads,
        scale=case.softmax_scale,
        kv_lora_rank=case.latent_dim,
        qk_nope_head_dim=case.nope_dim,
        qk_rope_head_dim=case.rope_dim,
        v_head_dim=case.v_dim,
        vllm_config=None,
    )


def _merged(case: MlaCase, t: Tensors) -> Tensors:
    """merge_attn_states alone: parts of a request's rows that CPU_SDPA_MLA attends to apart.

    The first is merged with a part of no keys.
    """
    merge = part("v1.attention.ops.merge_attn_states").merge_attn_states
    backend, cache = _backend(case), t["cache"].clone()
    _implementation(case).do_kv_cache_update(
        t["latent"], t["k_pe"][:, None], cache, t["slots"], "auto", torch.ones(())
    )
    rows = slice(case.tokens)
    q_latent = torch.bmm(t["q_nope"][rows].transpose(0, 1), t["w_uk"]).transpose(0, 1)
    query = torch.cat([q_latent, t["q_pe"][rows]], -1)
    held = [
        cache[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]
        for table, length in zip(t["table"], case.lengths()[1], strict=True)
    ]
    out = q_latent.new_zeros(q_latent.shape)  # contiguous, as its kernels demand
    lse = torch.full((case.heads, case.tokens), -torch.inf)
    for index in range(case.splits):
        sizes = [max(1, -(-len(x) // case.splits)) for x in held]
        pieces = [x[index * n : index * n + n] for x, n in zip(held, sizes, strict=True)]
        key = torch.cat(pieces)[:, None].expand(-1, case.heads, -1)
        ends = torch.tensor([0, *map(len, pieces)]).cumsum(0)
        new = backend._ragged_sdpa(
            query, key, key[..., : case.latent_dim], torch.arange(case.batch + 1), ends, False, True
        )
        before, out, lse = (out, lse), torch.empty_like(out), torch.empty_like(lse)
        merge(out, *before, *new, output_lse=lse)
    o_latent = out
    out = torch.bmm(o_latent.transpose(0, 1), t["w_uv"]).transpose(0, 1)
    answer = _answer(case, q_latent, o_latent, out, cache)
    return answer | ({"lse": lse.T.contiguous()} if case.lse else {})


def _implementation(case: MlaCase) -> Any:
    return part("v1.attention.backends.mla.cpu_mla").CPUMLAImpl(
        num_heads=case.heads,
        head_size=case.width,
        scale=case.softmax_scale,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=None,
        kv_lora_rank=case.latent_dim,
        qk_nope_head_dim=case.nope_dim,
        qk_rope_head_dim=case.rope_dim,
        qk_head_dim=case.nope_dim + case.rope_dim,
        v_head_dim=case.v_dim,
        kv_b_proj=None,
    )


def _seq_lens(case: MlaCase) -> torch.Tensor:
    return torch.tensor(case.lengths()[1], dtype=torch.int32)


def _decode_kernel(case: MlaCase, t: Tensors) -> Tensors:
    """mla_decode_kvcache alone, over a cache that is written row by row."""
    ops = part("_custom_ops")
    cache, rows = t["cache"].clone(), slice(case.tokens)
    flat = cache.view(-1, case.width)
    kept = t["slots"] >= 0
    flat[t["slots"][kept]] = torch.cat([t["latent"], t["k_pe"]], -1)[kept]
    q_latent = torch.bmm(t["q_nope"][rows].transpose(0, 1), t["w_uk"]).transpose(0, 1)
    query = torch.cat([q_latent, t["q_pe"][rows]], -1)
    o_latent = q_latent.new_zeros(q_latent.shape)  # contiguous, which q_latent is not
    ops.mla_decode_kvcache_cpu(
        o_latent, query, cache, case.softmax_scale, t["table"], _seq_lens(case)
    )
    out = torch.bmm(o_latent.transpose(0, 1), t["w_uv"]).transpose(0, 1)
    return _answer(case, q_latent, o_latent, out, cache)


def _absorbing(
    attend: Callable[[MlaCase, Tensors, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[MlaCase, Tensors], Tensors]:
    """AMX_MLA around its attention: concat_and_cache, and bmm_cpu by weights packed once."""

    def run(case: MlaCase, t: Tensors) -> Tensors:
        ops, amx = part("_custom_ops"), torch.ops._C
        cache, rows = t["cache"].clone(), slice(case.tokens)
        ops.amx_mla_concat_and_cache(t["latent"], t["k_pe"], cache, t["slots"])
        w_uk = amx.convert_weight_packed(t["w_uk"].mT.contiguous())
        w_uv = amx.convert_weight_packed(t["w_uv"].mT.contiguous())
        q_latent = t["q_nope"].new_empty(case.tokens, case.heads, case.latent_dim)
        ops.bmm_cpu(q_latent.transpose(0, 1), t["q_nope"][rows].transpose(0, 1), w_uk, True, None)
        query = torch.cat([q_latent, t["q_pe"][rows]], -1)
        o_latent = attend(case, t, query, cache)
        out = o_latent.new_empty(case.tokens, case.heads, case.v_dim)
        ops.bmm_cpu(out.transpose(0, 1), o_latent.transpose(0, 1), w_uv, True, None)
        return _answer(case, q_latent, o_latent, out, cache)

    return run


def _amx_decode(
    case: MlaCase, t: Tensors, query: torch.Tensor, cache: torch.Tensor
) -> torch.Tensor:
    flat = cache.view(-1, 1, case.width)
    out = query.new_zeros(case.tokens, case.heads, case.latent_dim)
    logits = torch.zeros(case.tokens, case.heads, case.splits, case.latent_dim + 1)
    expand = part("v1.attention.backends.mla.amx_mla")._expand_block_table
    part("_custom_ops").cpu_mla_decode(
        query, flat, flat[..., : case.latent_dim], out, None, None, None, logits,
        expand(t["table"], cache.shape[1]), torch.arange(case.batch),
        _seq_lens(case).long(), case.softmax_scale, 0.0, False, 0, None, None,
    )  # fmt: skip
    return out


def _amx_extend(
    case: MlaCase, t: Tensors, query: torch.Tensor, cache: torch.Tensor
) -> torch.Tensor:
    flat, latent = cache.view(-1, 1, case.width), case.latent_dim
    fresh = torch.cat([t["latent"], t["k_pe"]], -1)[: case.tokens, None]
    out = query.new_empty(case.tokens, case.heads, latent)
    lens = torch.tensor(case.lengths()[0])
    expand = part("v1.attention.backends.mla.amx_mla")._expand_block_table
    part("_custom_ops").cpu_mla_extend(
        query, fresh, fresh[..., :latent], out, flat, flat[..., :latent],
        expand(t["table"], cache.shape[1]).long(), torch.arange(case.batch),
        _seq_lens(case).long(), lens, lens.cumsum(0) - lens, int(lens.max()),
        case.softmax_scale, 0.0, False, 0, None, None, None,
    )  # fmt: skip
    return out


CPU = Claims(DECODE, sizes=DEEPSEEK, pages=(16,))
PREFILL = Claims((EXTEND | {"splits"}) - {"stages"}, sizes=DEEPSEEK, pages=(16,))
MERGE = Claims((DECODE | {"splits", "lse"}) - {"padding"}, sizes=DEEPSEEK, pages=(16,))
AMX = Claims(DECODE | {"splits"}, sizes=DEEPSEEK, pages=(32, 64))
AMX_EXTEND = Claims(EXTEND, sizes=DEEPSEEK, pages=(32, 64))
CPU_DTYPES = ("float32", "bfloat16", "float16")
ABSORB = ("_C::bmm_cpu", "_C::convert_weight_packed", "_C::concat_and_cache_mla_cpu")


def _subject(
    name: str,
    run: Callable[[MlaCase, Tensors], Tensors],
    claims: Claims,
    dtypes: tuple[str, ...],
    lane: str,
    kernels: tuple[str, ...],
    refusal: Callable[[MlaCase], str | None] = lambda case: None,
) -> Subject:
    return Subject(
        name=f"vllm.mla.{name}",
        run=run,
        claims=claims,
        dtypes=dtypes,
        lanes=(lane,),
        refusal=lambda case: claims.lacking(case) or refusal(case),
        kernels=kernels,
    )


def _no_prefill(case: MlaCase) -> str | None:
    return None if min(case.lengths()[0]) else "a prefill has a new token in each of its requests"


SUBJECTS = (
    _subject("cpu_mla", _cpu_mla, CPU, CPU_DTYPES, "cpu", ("_C::mla_decode_kvcache",)),
    _subject("decode_kvcache", _decode_kernel, CPU, CPU_DTYPES, "cpu", ("_C::mla_decode_kvcache",)),
    _subject("cpu_mla_prefill", _prefill, PREFILL, CPU_DTYPES, "cpu", (), _no_prefill),
    _subject("merge_attn_states", _merged, MERGE, CPU_DTYPES, "cpu", ()),
    _subject(
        "amx_decode", _absorbing(_amx_decode), AMX, ("bfloat16",), "amx",
        (*ABSORB, "_C::decode_attention_cpu"),
    ),
    _subject(
        "amx_extend", _absorbing(_amx_extend), AMX_EXTEND, ("bfloat16",), "amx",
        (*ABSORB, "_C::extend_attention_cpu"),
    ),
)  # fmt: skip
