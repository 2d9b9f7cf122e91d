"""The reference rope: equal to transformers' own functions and models, and to its docstring."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cases import yarn
from cases.yarn import YarnCase
from harness.programs.yarn import YarnArithmetic, relative_error
from references import yarn as reference
from references.hf import yarn as witness

UNIT = 2.0**-53
FLOAT64 = YarnArithmetic(power_error=6.0, log_error=2.0)
"""Both sides in float64: twice the errors of one of them, in its unit roundoffs."""

ALL = frozenset(yarn.FEATURES) - {"scattered"}
PLAIN = ALL - {"nope", "interleaved", "partial", "nested", "temperature"}
CLAIMS = {
    "llama": yarn.Claims(PLAIN),
    "gpt_oss": yarn.Claims(PLAIN - {"old_names"}),
    "phi3": yarn.Claims(
        (PLAIN | {"partial"}) - set(yarn.TYPES), always=("original_at_top", "longrope")
    ),
    "laguna": yarn.Claims((PLAIN | {"partial"}) - {"truncate", "type_key"}, always=("nested",)),
    "ministral3": yarn.Claims(PLAIN - {"original_at_top"}, always=("temperature",)),
    "llama4_text": yarn.Claims(PLAIN, always=("interleaved",)),
    "deepseek_v2": yarn.Claims(PLAIN, always=("nope", "interleaved")),
    "deepseek_v3": yarn.Claims(PLAIN, always=("nope", "interleaved")),
}
"""What each model can be asked; laguna without truncate, which it does not read."""

drawn = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
)


def bound(case: YarnCase, length: int) -> torch.Tensor:
    """How far two float64 evaluations of a frequency may be apart, `[rotary_dim / 2]`."""
    error = 2 * relative_error(FLOAT64, case.rope, length) * UNIT
    return error * reference.inv_freq(case.rope, length)


def asked(case: YarnCase) -> YarnCase:
    """One request, all keys its own, so that length means the same to both."""
    return replace(case, batch=1, offsets=case.offsets[:1], key_offsets=case.key_offsets[:1])


@pytest.mark.parametrize("model", CLAIMS)
def test_frequencies_and_attention_factor_are_transformers(model):
    @drawn
    @given(case=yarn.strategy(CLAIMS[model], ("float32",)))
    def check(case):
        case = asked(case)
        length = case.lengths[0]
        table, factor = witness.parameters(model, case.config(), length)
        own = reference.inv_freq(case.rope, length)
        if case.proportional:
            own = own[: table.shape[-1]]
        assert table.shape == own.shape
        assert bool(((table - own).abs() <= bound(case, length)).all())
        assert abs(factor - case.rope.attention_factor) <= 8 * UNIT * factor

    check()


@pytest.mark.parametrize("model", CLAIMS)
def test_logits_are_the_models_own(model):
    """The composed scale, the rotation and the temperature, each as the model puts them.

    A component of q is off by at most (|a| + |b|) (d + 4 u) for an angle off by
    d = pos w (E + 2) u, k likewise, so a logit by less than

        2 (d_q + d_k + (D + 16) u) s m^2 t sum|q| sum|k|

    with softmax scale s, attention factor m, temperature t and D columns.
    """

    @drawn
    @given(case=yarn.strategy(CLAIMS[model], ("float32",)))
    def check(case):
        case = asked(case)
        length = case.lengths[0]
        inputs = case.inputs()
        q, k = (inputs[n].double() for n in ("q", "k"))
        positions = torch.cat((inputs["q_positions"], inputs["k_positions"]), 1)
        wide_q = torch.cat((q, torch.zeros(1, case.heads, case.kv_len, case.head_dim)), 2)
        wide_k = torch.cat((torch.zeros(1, case.kv_heads, case.q_len, case.head_dim), k), 2)
        part = slice(case.nope, None)
        turned_q, turned_k, scaling = witness.rotated(
            model, case.config(), wide_q[..., part], wide_k[..., part], positions
        )
        turned_q, turned_k = turned_q[:, :, : case.q_len], turned_k[:, :, case.q_len :]
        group = case.heads // case.kv_heads
        scores = turned_q @ turned_k.repeat_interleave(group, 1).mT
        passed = slice(0, case.nope)
        scores = scores + q[..., passed] @ k[..., passed].repeat_interleave(group, 1).mT
        rope = case.rope
        error = relative_error(FLOAT64, rope, length).max() + 2
        fastest = reference.inv_freq(rope, length).max()
        turn = 2 * length * fastest * error * UNIT + (case.head_dim + 16) * UNIT
        sizes = q.abs().sum(-1)[..., None] * k.abs().sum(-1).repeat_interleave(group, 1)[:, :, None]
        growth = float(case.growth(inputs).max())
        allowed = 2 * turn * rope.softmax_scale * max(1, rope.attention_factor) ** 2 * growth
        off = (scaling * scores - case.expected(inputs)["logits"]).abs()
        assert bool((off <= allowed * sizes).all())

    check()


NESTED = dict(yarn.PINNED)["laguna-xs-factor-32"]


def test_transformers_does_not_read_a_nested_truncate():
    """What the witness says of it stays true; if this fails, transformers mended it."""
    whole = witness.parameters("laguna", NESTED.config())[0]
    split = witness.parameters("laguna", replace(NESTED, truncate=False).config())[0]
    assert torch.equal(whole, split)
    assert not torch.equal(
        reference.inv_freq(NESTED.rope, 1),
        reference.inv_freq(replace(NESTED, truncate=False).rope, 1),
    )


def test_gpt_oss_bounds_are_those_of_the_published_report():
    """B132: 8.0928 and 17.398 without rounding (d 64, theta 150000, L0 4096, factor 32)."""
    rope = dict(yarn.PINNED)["gpt-oss-20b"].rope
    low, high = reference.correction_range(rope)
    assert (round(low, 4), round(high, 3)) == (8.0928, 17.398)
    assert reference.correction_range(replace(rope, truncate=True)) == (8.0, 18.0)


def test_composed_scales_of_published_models():
    """The numbers that model cards and bug reports give."""
    pinned = dict(yarn.PINNED)
    for name, magnitude in {"laguna-s-factor-128": 1.4852, "laguna-xs-factor-32": 1.3466}.items():
        rope = pinned[name].rope
        assert round(math.sqrt(reference.composed_scale(rope)[0] * 128**0.5), 4) == magnitude
        assert reference.composed_scale(rope)[1] == 128**-0.5
    for name, growth in {"deepseek-v2": 1.59, "deepseek-v3": 1.87}.items():
        rope = pinned[name].rope
        assert round(reference.composed_scale(rope)[0] * 192**0.5, 2) == growth
        assert reference.composed_scale(rope)[0] == reference.composed_scale(rope)[1]


@pytest.mark.parametrize(
    ("factor", "given", "twice"), [(128.0, None, "2.2058 instead of 1.4852"),
                                   (40.0, None, "1.8739 instead of 1.3689"),
                                   (1.05, None, "1.0098 instead of 1.0049"),
                                   (32.0, 1.1, "1.2100 instead of 1.1000")]
)  # fmt: skip
def test_a_wrong_composition_is_told_in_a_sentence(factor, given, twice):
    case = replace(dict(yarn.PINNED)["qwen-3-8b-yarn"], factor=factor, attention_factor=given)
    right = case.expected_scale()
    assert case.wording({"scale": right}) is None
    wrong = right * case.rope.attention_factor**2
    said = case.wording({"scale": wrong}) or ""
    assert said.startswith(f"logits are scaled by {twice}")
    assert said.endswith("mscale applied twice")


def test_a_dropped_attention_factor_is_told():
    case = dict(yarn.PINNED)["laguna-attention-factor-1.1"]
    ignored = replace(case, attention_factor=None).expected_scale()
    assert "attention_factor ignored" in (case.wording({"scale": ignored}) or "")


def test_a_missing_softmax_mscale_is_told():
    case = dict(yarn.PINNED)["deepseek-v3"]
    plain = torch.full((2,), 192**-0.5)
    said = case.wording({"scale": plain}) or ""
    assert "mscale dropped from the softmax scale" in said


def test_longrope_is_short_at_the_original_length_and_long_beyond():
    rope = dict(yarn.PINNED)["phi-3-mini-128k-long"].rope
    pairs = torch.arange(0, 96, 2, dtype=torch.float64) / 96
    plain = rope.base**-pairs
    tensor = functools.partial(torch.tensor, dtype=torch.float64)
    assert torch.equal(reference.inv_freq(rope, 4096), plain / tensor(rope.short))
    assert torch.equal(reference.inv_freq(rope, 4097), plain / tensor(rope.long))


def test_logits_depend_on_distance_alone():
    """Rotation is relative: the same distance anywhere gives the same logits (no temperature)."""
    case = replace(dict(yarn.PINNED)["llama-3.1-8b"], frequencies=False, composed=False)
    here = case.expected(case.inputs())["logits"]
    moved = replace(case, offsets=(5000 + 7,), key_offsets=(4000 + 7,))
    there = moved.expected(moved.inputs())["logits"]
    # Angles up to 5007 rad are rounded to 2^-53 relative, twice; 128 columns of |x| < 3.5.
    assert float((here - there).abs().max()) <= 4 * 5007 * UNIT * 128 * 3.5**2 * 0.09


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type='spiral' is unknown; expected one of default"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": None}, "truncate=None is ambiguous"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor has 1 numbers, expected"),
        ({"rope_type": "longrope", "short_mscale": 1.1}, "short_mscale=1.1 has no meaning"),
        ({"rope_type": "default", "partial_rotary_factor": 0.01}, "rotary_dim=0 must be even"),
    ],
)
def test_what_has_no_meaning_is_refused(change, message):
    config: dict[str, Any] = {
        "model_type": "llama", "num_attention_heads": 2, "head_dim": 64,
        "max_position_embeddings": 4096, "rope_parameters": change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        reference.read(config)


def test_the_whole_is_its_parts():
    for _, case in yarn.PINNED:
        inputs = case.inputs()
        whole = reference.yarn(**inputs, config=case.config(), layer_type=case.layer_type)
        assert torch.equal(whole, case.expected(inputs)["logits"])


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_and_new_names_mean_the_same(key):
    rope = {key: "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    top: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 32768}
    old = reference.read(top | {"rope_scaling": rope, "rope_theta": 5e5})
    new = reference.read(top | {"rope_parameters": rope | {"rope_theta": 5e5}})
    nested = reference.read(
        top
        | {"layer_types": ["full_attention"]}
        | {"rope_parameters": {"full_attention": rope | {"rope_theta": 5e5, "mscale": None}}},
        "full_attention",
    )
    assert old == new == nested
