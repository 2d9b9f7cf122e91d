"""Whole models of sglang beside those that they stand for; run by sglang's own Python.

`python -m tests.whole_sglang` prints one JSON object: what each pair answered.
"""

# pyright: reportMissingImports=false

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import torch
from mlx_lm.models import cache, gpt_oss, llama, qwen3
from sglang.multimodal_gen.runtime.layers.attention import selector
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.multimodal_gen.runtime.models.encoders.mistral_3 import Ministral3ForCausalLM
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.srt.hardware_backend.mlx import aot
from sglang.srt.hardware_backend.mlx.kv_cache import attention_contract
from transformers import Ministral3Config
from transformers.models.ministral3 import modeling_ministral3

from harness.engines.sglang.calls.served import Runner
from tests import planted_sglang as planted

WINDOW, VOCABULARY, STEPS = 8, 64, 16
LENGTHS = (21, 9, 13, 5)
"""Of the prompts of one batch, around the window and beyond it."""
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCABULARY, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_KINDS = ["sliding_attention", "full_attention"]


def _gpt_oss() -> Any:
    return gpt_oss.Model(
        gpt_oss.ModelArgs(
            **_SIZES,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=WINDOW,
            rope_scaling=_YARN,
        )
    )


def _llama() -> Any:
    return llama.Model(
        llama.ModelArgs(
            **_SIZES, model_type="llama", rms_norm_eps=1e-5, rope_scaling=_YARN,
            sliding_window=WINDOW, layer_types=_KINDS,
        )
    )  # fmt: skip


def _qwen3() -> Any:
    return qwen3.Model(
        qwen3.ModelArgs(
            **_SIZES, model_type="qwen3", rms_norm_eps=1e-5, max_position_embeddings=256,
            rope_theta=10000.0, tie_word_embeddings=False,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {"gpt_oss": _gpt_oss, "llama": _llama, "qwen3": _qwen3}


def _made(name: str) -> Any:
    """The model with loud weights, so that a wrong key changes the ids; sinks that weigh."""
    mx.random.seed(7)
    model = MODELS[name]()
    for layer in model.layers:
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = layer.self_attn[projection]
            module.weight = module.weight * 4
        if "sinks" in layer.self_attn:
            layer.self_attn.sinks = mx.array([2.0, 1.0, 3.0, 2.0])
    mx.eval(model.parameters())
    return model


def _prompts() -> list[list[int]]:
    return [[(7 * i + 3 * n) % VOCABULARY for i in range(n)] for n in LENGTHS]


def _alone(model: Any) -> list[list[int]]:
    """Greedy ids of mlx_lm's model as it is, one request after the other."""
    found = []
    for prompt in _prompts():
        store, ids, tokens = cache.make_prompt_cache(model), [], prompt
        for _ in range(STEPS):
            tokens = [int(mx.argmax(model(mx.array([tokens]), cache=store)[0, -1]))]
            ids += tokens
        found.append(ids)
    return found


def _served(model: Any, *, contiguous: bool = False, pooled: bool = False) -> list[list[int]]:
    """Greedy ids of the same model behind sglang's runner: prompts in two chunks, one batch."""
    runner = Runner(model, contiguous=contiguous, slots=sum(LENGTHS) if pooled else None)
    names, found, used = [], [], 1
    for i, prompt in enumerate(_prompts()):
        name, half = f"request {i}", len(prompt) // 2
        slots = list(range(used, used + len(prompt)))[::-1] if pooled else []
        used += len(slots)
        if pooled:  # the first half is what an earlier request has left in the pool
            runner.prefill("earlier", prompt[:half], prompt[:half], [], slots[:half], i)
            runner.remove_request("earlier")
            first = runner.prefill(name, prompt[half:], prompt, slots[:half], slots[half:], i)
        else:
            runner.prefill(name, prompt[:half], prompt[:half], [], [], i, needs_logits=False)
            first = runner.extend(name, prompt[half:], [])
        names.append(name)
        found.append([first])
    for _ in range(STEPS - 1):
        for ids, token in zip(found, runner.decode_batch(names), strict=True):
            ids.append(token)
    return found


def mlx(name: str, plant: str = "", **more: bool) -> dict[str, Any]:
    """Ids of the model alone and served, the latter with a bug planted."""
    alone = _alone(_made(name))
    patch = {one.name: one.patch for one in planted.PLANTS}.get(plant, contextlib.nullcontext)
    with patch():
        return {"alone": alone, "served": _served(_made(name), **more)}


def contracts() -> dict[str, Any]:
    """What the attention contract reads from models of either spelling."""
    found = {}
    for name in MODELS:
        model = _made(name)
        inner = model.layers[0].self_attn
        found[name] = {
            "scale": attention_contract.get_attention_scale(inner),
            "windows": sorted(attention_contract.get_layer_window_sizes(model).items()),
            "attention": attention_contract.is_attention_module(inner),
        }
    return found


def gates() -> dict[str, bool]:
    """Whether the AOT kernel would be built for a rope of each type; a stand-in for Metal is."""
    aot._load_metal_rope_pool_fused = lambda: object
    ropes = {
        "default": None,
        "linear": {"rope_type": "linear", "factor": 4.0},
        "yarn": _YARN,
        "llama3": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "longrope": {
            "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
    }  # fmt: skip
    found = {}
    for name, rope in ropes.items():
        args = llama.ModelArgs(
            **_SIZES, model_type="llama", rms_norm_eps=1e-5, rope_scaling=rope,
            max_position_embeddings=256,
        )  # fmt: skip
        inputs = aot.MlxAOTKernelBuildInputs(llama.Attention(args), 2, 16)
        found[name] = aot._build_rope_kernel(inputs).enabled
    return found


def ministral3(dtype: torch.dtype) -> dict[str, Any]:
    """sglang's own decoder and transformers', same weights: prompt, cached decode, greedy ids.

    The prompt crosses the original context twice, so the query temperature is not 1.
    """
    kind: Any = Ministral3Config
    config = kind(
        **_SIZES, max_position_embeddings=256, pad_token_id=0, attn_implementation="sdpa",
        rope_parameters=_YARN | {
            "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    )  # fmt: skip
    torch.manual_seed(7)
    with selector.global_force_attn_backend_context_manager(AttentionBackendEnum.TORCH_SDPA):
        mine: Any = Ministral3ForCausalLM(config).to(dtype).eval()
    theirs: Any = modeling_ministral3.Ministral3ForCausalLM(config)
    theirs = theirs.to(dtype).eval()
    theirs.load_state_dict(mine.state_dict())
    ids = torch.tensor([[(7 * i) % VOCABULARY for i in range(37)]])
    context = set_forward_context(current_timestep=0, attn_metadata=None)
    with torch.no_grad(), context:
        both = [model(input_ids=ids, use_cache=True) for model in (mine, theirs)]
        step = torch.tensor([[5, 6]])  # two queries over cached keys: lower-right
        more = [
            model(input_ids=step, past_key_values=out.past_key_values, use_cache=True).logits
            for model, out in zip((mine, theirs), both, strict=True)
        ]
        greedy = [
            model.generate(ids, max_new_tokens=STEPS, do_sample=False)[0, -STEPS:].tolist()
            for model in (mine, theirs)
        ]
    return {
        "prompt": torch.equal(both[0].logits, both[1].logits),
        "cached": torch.equal(more[0], more[1]),
        "ids": greedy,
    }


def main() -> None:
    found = {
        "gpt_oss": mlx("gpt_oss"),
        "gpt_oss_contiguous": mlx("gpt_oss", contiguous=True),
        "llama": mlx("llama"),
        "qwen3": mlx("qwen3"),
        "qwen3_pool": mlx("qwen3", pooled=True),
        "gpt_oss_without_sinks": mlx("gpt_oss", "sinks dropped in batched decode"),
        "gpt_oss_without_window": mlx(
            "gpt_oss", "window dropped in batched decode", contiguous=True
        ),
        "contracts": contracts(),
        "gates": gates(),
        "ministral3_float32": ministral3(torch.float32),
        "ministral3_bfloat16": ministral3(torch.bfloat16),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
