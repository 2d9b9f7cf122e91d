"""vLLM's rotary embeddings: `get_rope` by its CPU kernel and by torch, and as its models build it.

The config is read by vLLM itself, from a config.json, as that of a model that it serves. In a
server that compiles its models (the default) the torch forward is what is compiled; with
--enforce-eager the kernel runs. Their tables of cos and sin are as long as the context, and nothing
checks a position against them, so longer positions are refused here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cases.case import Inputs
from cases.yarn import DTYPES, FEATURES, PINNED, Claims, YarnCase
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import Mode
from harness.engines.vllm import part
from harness.programs.yarn import TRANSFORMERS, VLLM, VLLM_CUT, program
from harness.subject import Subject, Tensors
from references.yarn import probe_columns

Turn = Callable[[YarnCase, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(case, q, k, positions) to rotated q and k, all `[batch, heads, len, head_dim]`."""
Built = tuple[Turn, float]
"""What a model does to q and k, and the softmax scale that goes with it."""
Build = Callable[[YarnCase, Any], Built]
"""(case, the VllmConfig of a model with its config.json) to what the model does."""

MOST = 2**25
"""Numbers that a table of cos and sin may hold: it is built whole, so longer ones cost seconds."""
PUBLISHED = frozenset(case for _, case in PINNED)
"""Configs that are asked although their tables are twice as long."""

MODELS = {
    "llama": ("LlamaForCausalLM", "llama", "LlamaForCausalLM"),
    "laguna": ("LagunaForCausalLM", "laguna", "LagunaForCausalLM"),
    "ministral3": ("Ministral3ForCausalLM", "mistral", "MistralForCausalLM"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v2", "DeepseekV3ForCausalLM"),
}
"""By model_type: the architecture of its config.json, and module and class of vLLM's models."""


def _rope(case: YarnCase, config: Any) -> Any:
    """get_rope with the rope_parameters of the config, for pairs that lie either way."""
    hf = config.model_config.hf_config
    return part("model_executor.layers.rotary_embedding").get_rope(
        case.head_dim,
        max_position=hf.max_position_embeddings,
        rope_parameters=hf.rope_parameters,
        is_neox_style=not case.interleaved,
    )


def _get_rope(case: YarnCase, config: Any) -> Built:
    return _module(_rope(case, config)), case.head_dim**-0.5


def _get_rope_native(case: YarnCase, config: Any) -> Built:
    rope = _rope(case, config)
    return _module(getattr(rope, "forward_native", rope)), case.head_dim**-0.5


def _llama(case: YarnCase, config: Any) -> Built:
    attention = part("model_executor.models.llama").LlamaAttention(**_sizes(case, config))
    return _module(attention.rotary_emb), attention.scaling


def _laguna(case: YarnCase, config: Any) -> Built:
    attention = part("model_executor.models.laguna").LagunaAttention(
        **_sizes(case, config), head_dim=case.head_dim
    )
    return _module(attention.rotary_emb), attention.scaling


def _ministral3(case: YarnCase, config: Any) -> Built:
    """MistralAttention's own forward, up to its attention."""
    attention = part("model_executor.models.mistral").MistralAttention(**_sizes(case, config))
    caught: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caught[:] = q, k
        return torch.zeros_like(q)

    scale = attention.scaling
    attention.attn, attention.o_proj = _Told(attend), _Told(lambda out: (out, None))

    def turn(case: YarnCase, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        flat = [x.transpose(1, 2).flatten(2).flatten(0, 1) for x in (q, k, k)]
        attention.qkv_proj = _Told(lambda hidden: (torch.cat(flat, -1), None))
        attention(positions.flatten(), flat[0])
        return _unpacked(q, caught[0]), _unpacked(k, caught[1])

    return turn, scale


class _Told(nn.Module):
    """A part of a model that does as it is told."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = does


def _deepseek_v3(case: YarnCase, config: Any) -> Built:
    hf = config.model_config.hf_config
    attention = part("model_executor.models.deepseek_v2").DeepseekV2MLAAttention(
        vllm_config=config,
        config=hf,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        qk_nope_head_dim=hf.qk_nope_head_dim,
        qk_rope_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        max_position_embeddings=hf.max_position_embeddings,
        cache_config=config.cache_config,
        prefix="layers.0.self_attn",
    )
    return _module(attention.rotary_emb), attention.scaling


def _sizes(case: YarnCase, config: Any) -> dict[str, Any]:
    hf = config.model_config.hf_config
    return {
        "config": hf,
        "hidden_size": hf.hidden_size,
        "num_heads": case.heads,
        "num_kv_heads": case.kv_heads,
        "max_position_embeddings": hf.max_position_embeddings,
        "cache_config": config.cache_config,
        "prefix": "layers.0.self_attn",
    }


def _module(rope: Callable[..., Any]) -> Turn:
    """A rotary module as models call it: tokens of all requests, or their heads' last columns."""

    def turn(case: YarnCase, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel writes in place, where q and k must not share memory.
        flat = [x.transpose(1, 2).flatten(0, 1).clone() for x in (q, k)]
        if not case.nope:
            flat = [x.flatten(1) for x in flat]
            found = rope(positions.flatten(), *flat)
        else:  # latent attention hands over views of its queries, and puts back what it gets
            found = rope(positions.flatten(), *(x[..., case.nope :] for x in flat))
            found = [
                torch.cat((x[..., : case.nope], y), -1) for x, y in zip(flat, found, strict=True)
            ]
        return _unpacked(q, found[0]), _unpacked(k, found[1])

    return turn


def _unpacked(like: Tensor, flat: Tensor) -> Tensor:
    """[tokens, heads * head_dim] to the shape of `like`."""
    batch, heads, tokens, columns = like.shape
    return flat.reshape(batch, tokens, heads, columns).transpose(1, 2)


def _config_json(case: YarnCase) -> dict[str, Any]:
    """The case's config.json, small, with a context that its positions fit in.

    Where the length of the context has no other meaning, it is what the table is cut to.
    """
    written = case.config() | {"max_position_embeddings": _context(case)}
    small = {"intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 2, "pad_token_id": 0}
    latent = {}
    if case.nope:
        # CPU_MLA knows rows of 576 columns; 512 of them are latent in the models.
        latent = {"q_lora_rank": None, "kv_lora_rank": 576 - case.head_dim + case.nope}
        latent |= {"v_head_dim": 8}
    model = _model(case)
    return {
        **written, **small, **latent, "model_type": model, "architectures": [MODELS[model][0]],
    }  # fmt: skip


def _context(case: YarnCase) -> int:
    """max_position_embeddings: as in the case where it counts, else what its positions take."""
    if case.rope_type in ("default", "llama3", "proportional"):
        return case.far + 1
    if case.linear:
        return math.ceil((case.far + 2) / case.rope.factor)
    return case.max_positions


def _model(case: YarnCase) -> str:
    """A model_type whose config has such a rope: llama's has each that needs no own model."""
    return case.model_type if case.model_type in MODELS else "llama"


@functools.cache
def _server() -> None:
    """One process that is its whole group, and model classes that need no process of their own to
    be inspected."""
    state = part("distributed.parallel_state")
    config = part("config")
    with config.set_current_vllm_config(config.VllmConfig()):
        rendezvous = Path(tempfile.mkdtemp()) / "group"
        state.init_distributed_environment(1, 0, rendezvous.as_uri(), 0, "gloo")
        state.initialize_model_parallel(1, 1)


@functools.cache
def _registered(model: str) -> None:
    architecture, module, name = MODELS[model]
    model_class = getattr(part(f"model_executor.models.{module}"), name)
    part("model_executor.models").ModelRegistry.register_model(architecture, model_class)


@contextlib.contextmanager
def _building(case: YarnCase, dtype: torch.dtype) -> Iterator[Any]:
    """As while a model is loaded: its VllmConfig, in its dtype; with no rope of an earlier case."""
    _server()
    _registered(_model(case))
    config, ropes = part("config"), part("model_executor.layers.rotary_embedding")._ROPE_DICT
    before = torch.get_default_dtype()
    longest = None
    if case.longrope:  # a server for the requests at hand: with the short factors if they all fit
        original = int(case.rope.original_max)
        longest = case.max_positions if case.far >= original else min(original, case.max_positions)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config_json(case)))
        model = config.ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=longest,
        )
    ropes.clear()
    torch.set_default_dtype(dtype)
    served = config.VllmConfig(model_config=model)
    try:
        with config.set_current_vllm_config(served):
            yield served
    finally:
        torch.set_default_dtype(before)
        ropes.clear()


def _answer(build: Build) -> Callable[[YarnCase, Tensors], Tensors]:
    def run(case: YarnCase, tensors: Tensors) -> Tensors:
        q, k = tensors["q"], tensors["k"]
        positions = torch.cat((tensors["q_positions"], tensors["k_positions"]), 1)
        wide_q = torch.cat((q, q.new_zeros(*q.shape[:2], k.shape[2], q.shape[3])), 2)
        wide_k = torch.cat((k.new_zeros(*k.shape[:2], q.shape[2], k.shape[3]), k), 2)
        with _building(case, q.dtype) as config:
            turn, scale = build(case, config)
            query, key = turn(case, wide_q, wide_k, positions)
        query, key = query[:, :, : case.q_len], key[:, :, case.q_len :]
        out = {"logits": _logits(query, key, scale)}
        if case.composed:
            out["scale"] = _composed(case, build)
        return out | ({"q": query, "k": key} if case.rotated else {})

    return run


def _logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query.float() @ key.float().mT) * scale


def _composed(case: YarnCase, build: Build) -> Tensor:
    """The composed scale, measured: logits of unit vectors at position 0, in float32."""
    probe = torch.zeros(1, 1, 2, case.head_dim)
    for token, column in enumerate(probe_columns(case.rope)):
        probe[0, 0, token, column] = 1.0
    q = probe.expand(1, case.heads, 2, case.head_dim)
    k = probe.expand(1, case.kv_heads, 2, case.head_dim)
    with _building(case, torch.float32) as config:
        turn, scale = build(case, config)
        query, key = turn(case, q, k, torch.zeros(1, 2, dtype=torch.int64))
    return _logits(query, key, scale)[0, 0].diagonal().contiguous()


def _rows(case: YarnCase) -> int:
    """Positions in the tables of cos and sin."""
    rope = case.rope
    if case.yarn:
        return int(rope.original_max * rope.factor)
    return int(_context(case) * rope.factor) if case.linear else _context(case)


def _table(case: YarnCase) -> str | None:
    rows, most = _rows(case), 2 * MOST if case in PUBLISHED else MOST
    if case.far >= rows:
        return "a position beyond the context, for which there is no table"
    size = (rows + (int(case.rope.original_max) if case.longrope else 0)) * case.rope.rotary_dim
    if size > most:
        return f"a table of {size / 1e6:.0f} million numbers, expected at most {most / 1e6:.0f}"
    if case.longrope and case.interleaved:
        return "Phi3LongRoPEScaledRotaryEmbedding rotates halves, and says so"
    return None


def _latent(case: YarnCase) -> str | None:
    return "a lone mscale counts, as in DeepSeek's own code" if case.lone_mscale else None


def _kernel_program(case: YarnCase, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
    """Halves are rotated in vectors, which are stored in bfloat16 by cutting off the lower bits
    where the CPU has no instruction for it; neighbouring columns one by one, and rounded."""
    cut = case.dtype == "bfloat16" and not (case.interleaved or _BF16)
    return program(VLLM_CUT if cut else VLLM)(case, inputs, mode)


_BF16 = torch.cpu._is_avx512_bf16_supported()


def _subject(
    name: str,
    build: Build,
    claims: Claims,
    refusal: Callable[[YarnCase], str | None] = lambda case: None,
    kernel: bool = True,
) -> Subject:
    """kernel: all its ropes go through the CPU kernel, which the path proof demands."""
    return Subject(
        name=f"vllm.yarn.{name}",
        run=_answer(build),
        claims=claims,
        dtypes=DTYPES,
        programs={"cpu": _kernel_program if kernel else program(TRANSFORMERS)},
        refusal=lambda case: claims.lacking(case) or refusal(case) or _table(case),
        kernels=("_C::rotary_embedding",) if kernel else (),
    )


_ALL = frozenset(FEATURES) - {"temperature", "frequencies", "nulls"}
"""A null is a value to vLLM, and raises."""
_DIRECT = _ALL - {"nope", "nested"}
_LONG = {"longrope", "short_factor", "long_factor"}
_MODEL = _DIRECT - {"interleaved", "proportional"}
_YARN = frozenset(
    {
        "yarn", "factor", "original_max", "beta_fast", "beta_slow", "truncate", "mscale",
        "mscale_all_dim", "original_at_top",
    }
)  # fmt: skip
"""attention_factor is not read, nor is it by DeepSeek's own code."""
_OFTEN = frozenset({"old_names", "type_key", "scattered", "composed", "rotated"})
_LATENT = Claims(_YARN | _OFTEN, always=("nope", "interleaved", "yarn"))
_LATENT_PLAIN = Claims(_OFTEN, always=("nope", "interleaved"))
SUBJECTS = (
    _subject("get_rope", _get_rope, Claims(_DIRECT - _LONG)),
    _subject("get_rope_native", _get_rope_native, Claims(_DIRECT), kernel=False),
    _subject("llama", _llama, Claims(_MODEL - _LONG)),
    _subject(
        "laguna",
        _laguna,
        Claims(
            _ALL - _LONG - {"nope", "interleaved", "proportional", "old_names", "original_at_top"},
            always=("nested",),
        ),
    ),
    _subject("ministral3", _ministral3, Claims((_MODEL | {"temperature"}) - _LONG)),
    _subject("deepseek_v3", _deepseek_v3, _LATENT, _latent, kernel=False),
    _subject("deepseek_plain", _deepseek_v3, _LATENT_PLAIN),
)
