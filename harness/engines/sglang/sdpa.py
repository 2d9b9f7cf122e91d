"""sglang's attention: SDPAImpl of its diffusion runtime, its torch backend, and its MLX server."""

from cases.sdpa import SdpaCase
from harness.engines.sglang import deferred
from harness.programs import sdpa as programs
from harness.subject import Subject

DTYPES = ("float32", "bfloat16", "float16")
SERVED = frozenset({"causal", "window", "scale", "kv_lens", "side", "layout", "schedule"})


def _in_cache(case: SdpaCase) -> str | None:
    """A server writes the keys of its own queries, causally."""
    if not case.causal and case.q_len > 1:
        return "the server's attention is causal: only a single query sees all keys"
    if case.q_len > min(case.kv_lens or (case.kv_len,)):
        return "a request's cache holds at least the keys of its own queries"
    return None


def _served(
    name: str, claims: frozenset[str], *, model: str, contiguous: bool = False, pooled: bool = False
) -> Subject:
    return Subject(
        name=f"sglang.sdpa.mlx_{name}",
        run=deferred("served", "attention", model, contiguous=contiguous, pooled=pooled),
        runtime="mlx",
        claims=claims,
        dtypes=DTYPES,
        lanes=("mps",),
        programs={"cpu": programs.program(programs.MLX)},
        refusal=_in_cache,
        kernels=("mlx:{device}",),
    )


def _multimodal(case: SdpaCase) -> str | None:
    if case.causal and case.q_len > case.kv_len:
        return "cached decoding: a query has its own key at least"
    return None


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
PLAIN = frozenset({"causal", "scale", "layout"})

SUBJECTS = (
    Subject(
        name="sglang.sdpa.multimodal",
        run=deferred("torch_attention", "multimodal"),
        claims=PLAIN | {"schedule"},
        dtypes=DTYPES,
        lanes=("cpu", "amx", "mps", "cuda"),
        programs={"cpu": programs.program(programs.torch_flash())},
        refusal=_multimodal,
    ),
    Subject(
        name="sglang.sdpa.torch_native",
        run=deferred("torch_attention", "torch_native"),
        claims=PLAIN | {"window", "softcap", "kv_lens", "side", "schedule"},
        dtypes=DTYPES,
        lanes=("cpu", "amx"),
        programs={"cpu": programs.by_request(programs.program(programs.torch_flash()))},
        refusal=_in_cache,
        kernels=(FLASH,),
    ),
    _served("gpt_oss", SERVED | {"sinks"}, model="gpt_oss"),
    _served("gpt_oss_contiguous", SERVED | {"sinks"}, model="gpt_oss", contiguous=True),
    _served("llama", SERVED, model="llama"),
    _served("qwen3", SERVED - {"window"}, model="qwen3"),
    _served("qwen3_pool", SERVED - {"window"}, model="qwen3", pooled=True),
)
