"""The native rope by itself: what it reads, what it says to other engines, what it refuses."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cases import yarn
from cases.yarn import YarnCase
from harness import engines
from harness.campaign import Absent
from harness.engines.native.torch import yarn as native
from harness.power import planted
from harness.programs.yarn import MLX, program
from harness.record import Status
from harness.run import ask
from references import yarn as reference

ALL = frozenset(yarn.FEATURES)
PINNED = dict(yarn.PINNED)
drawn = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=(HealthCheck.too_slow,),
)


def _same(one: float, two: float, roundings: int) -> bool:
    """Equal but for so many float64 roundings."""
    return abs(one - two) <= roundings * 2.0**-53 * abs(two)


@drawn
@given(case=yarn.strategy(ALL, ("float32",)))
def test_reads_what_the_reference_reads(case: YarnCase):
    own, meant = native.read(case.config(), case.layer_type), case.rope
    assert (own.kind, own.theta, own.rotary_dim, own.first, own.pairs) == (
        meant.kind, meant.base, meant.rotary_dim, meant.start, meant.interleaved
    )  # fmt: skip
    # Logarithms, a quotient, squares and roots in float64: a few roundings each.
    assert _same(own.magnitude, meant.attention_factor, 8)
    assert _same(own.softmax_scale, meant.softmax_scale, 8)
    for length in case.lengths:
        theirs = reference.inv_freq(meant, length)
        # d/(d-2) and base**pair carry the rounding of a logarithm up to ln(5e6): 2**6 roundings.
        assert bool(((native.frequencies(own, length) - theirs).abs() <= 2.0**-47 * theirs).all())


def _translated(case: YarnCase, to: Any, **more: Any) -> native.Translation | None:
    try:
        return to(native.read(case.config(), case.layer_type), **more)
    except native.RopeError:
        return None


def _g(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


@drawn
@given(case=yarn.strategy(ALL - {"dynamic", "longrope", "proportional"}, ("float32",)))
def test_sglang_and_vllm_compose_the_same_scale(case: YarnCase):
    """By their own rules: the cos/sin cache times g(factor) * attn_factor in sglang and times
    attention_factor in vLLM, logits times scale."""
    expected = reference.composed_scale(case.rope)[0]
    for to, place in ((native.to_sglang, "rope_scaling"), (native.to_vllm, "rope_parameters")):
        told = _translated(case, to)
        assert told is not None
        scaling, other = told.arguments[place] or {}, place == "rope_parameters"
        read = "attention_factor" if other else "attn_factor"
        factors = {"attn_factor", "attention_factor", "mscale", "mscale_all_dim"} & set(scaling)
        assert factors == ({read} if case.yarn else set())
        cached = scaling[read] * (1 if other else _g(scaling["factor"])) if case.yarn else 1.0
        assert _same(told.softmax_scale * cached**2, expected, 16)
        assert _same(told.composed_scale, expected, 16)


@pytest.mark.parametrize(
    ("name", "attn_factor"),
    [
        ("laguna-s-factor-128", 1.0),
        ("laguna-xs-factor-32", 1.0),
        ("laguna-attention-factor-1.1", 1.1 / 1.3465735902799727),
        ("laguna-attention-factor-1", 1.0 / 1.4158883083359672),
    ],
)
def test_attention_factor_is_divided_by_what_sglang_multiplies_with(name, attn_factor):
    """The final value passed on as it is would square the magnitude: 2.2058 for 1.4852."""
    told = _translated(PINNED[name], native.to_sglang)
    assert told is not None
    assert _same(told.arguments["rope_scaling"]["attn_factor"], attn_factor, 8)


def test_the_words_for_mlx_lm_mean_the_same_in_mlx_lm():
    """Real mlx_lm ropes made of the translation, on drawn cases, held to mlx_lm's arithmetic."""
    if reason := engines.absent("mlx_lm"):
        raise Absent(reason)
    from harness.engines.mlx_lm import yarn as adapter

    asked = 0
    claims = ALL - {"dynamic", "temperature", "scattered", "frequencies"}

    @drawn
    @given(case=yarn.strategy(claims, ("float32", "bfloat16")))
    def check(case: YarnCase):
        nonlocal asked
        if case.mixed_lengths or (case.longrope and case.interleaved):
            return  # one table a call; SuScaledRoPE rotates halves
        told = _translated(case, native.to_mlx_lm, length=case.lengths[0])
        if told is None:
            return
        asked += 1
        run = adapter.run(lambda _: adapter.built(told.arguments, told.softmax_scale))
        cell = planted.cell("yarn", run, program(MLX), runtime="mlx", lanes=("mps",))
        record = ask(case, cell)
        assert record.status in (Status.AGREE, Status.VACUOUS), f"{record.why}: {case.to_json()}"

    check()
    assert asked >= 30


@pytest.mark.parametrize(
    ("to", "name", "message"),
    [
        (native.to_sglang, "phi-3-mini-128k-long", "longrope: sglang chooses the factors by"),
        (native.to_vllm, "phi-3-mini-128k-long", "longrope: vLLM chooses the factors by"),
        (native.to_mlx_lm, "phi-3-mini-128k-long", "long_factor at every length; give the request"),
        (native.to_mlx_lm, "gpt-oss-20b", "truncate=false: mlx-lm rounds the ramp's bounds"),
    ],
)
def test_what_an_engine_means_otherwise_is_refused(to, name, message):
    case = PINNED[name]
    with pytest.raises(native.RopeError, match=message):
        to(native.read(case.config(), case.layer_type))


@pytest.mark.parametrize("to", [native.to_sglang, native.to_vllm])
def test_dynamic_rope_of_one_base_is_refused(to):
    case = replace(PINNED["position-a-million"], dynamic=True, factor=4.0)
    with pytest.raises(native.RopeError, match="has one base for all lengths"):
        to(native.read(case.config()))


TOP: dict[str, Any] = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral' is not known; known:"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "mscale_al_dim": 1.0}},
            "mscale_al_dim=1.0 is not known in a yarn rope; known: attention_factor",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_mscale": 1.2}},
            "short_mscale=1.2 is not known in a longrope rope",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "truncate": None}},
            "truncate=null: transformers reads false, others true",
        ),
        (
            {
                "model_type": "nobody",
                "rope_parameters": {"rope_type": "yarn", "factor": 4, "mscale_all_dim": 1.0},
            },
            "model_type='nobody' with mscale_all_dim=1.0: whether its softmax scale",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "layer_type=None: this config has a rope for each of full_attention; name one",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.3}},
            "partial_rotary_factor=0.3 of 64 columns: not a number of pairs",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_a_sentence(config, message):
    with pytest.raises(native.RopeError, match=message):
        native.read(TOP | config)


def test_it_stands_by_itself(tmp_path: Path):
    """The file alone, in a Python that knows torch and nothing of this project."""
    case = PINNED["deepseek-v3"]
    (tmp_path / "rope.py").write_text(Path(native.__file__).read_text())
    (tmp_path / "config.json").write_text(json.dumps(case.config()))
    code = (
        "import json, torch, rope\n"
        "made = rope.read(json.load(open('config.json')))\n"
        "x, at = torch.ones(1, 1, 2, made.head_dim), torch.tensor([[3, 900]])\n"
        "q, k = rope.Rotary(made)(x, x, at, at)\n"
        "print(rope.to_torch(made).composed_scale, float((q @ k.mT)[0, 0, 0, 1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.')\n{code}"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    scale, product = map(float, done.stdout.split())
    assert _same(scale, reference.composed_scale(case.rope)[0], 16)
    ones, at = torch.ones(1, 1, 2, 192), torch.tensor([[3, 900]])
    logits = reference.yarn(ones, ones, at, at, case.config())
    # A float32 product of 192 columns of size below 2: 194 roundings of 2**-24, and two tables.
    bound = 4 * 192 * 200 * 2.0**-24 * scale
    assert abs(scale * product - float(logits[0, 0, 0, 1])) <= bound
