"""Cases on trial: they survive JSON, give the same bytes anywhere, and say what can't be seen."""

import dataclasses
import hashlib
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
from cases import layouts, values
from cases.drawing import Draw
from cases.memory import remembered
from cases.sdpa import SdpaCase
from harness.contract import changed
from references.sdpa import alibi_slopes

SMALL = SdpaCase(
    dtype="float32", seed=3, values="normal", batch=1, q_len=2, kv_len=5, heads=2, kv_heads=1,
    head_dim=8,
)  # fmt: skip


def _drawn(op):
    module = cases.load(op)
    return module.strategy(frozenset(module.FEATURES), module.DTYPES)


@pytest.mark.parametrize("op", cases.OPS)
def test_a_case_survives_json(op):
    @settings(max_examples=50, derandomize=True, deadline=None, database=None)
    @given(case=_drawn(op))
    def check(case):
        again = type(case).from_json(case.to_json())
        assert again == case
        assert again.id == case.id

    check()


@pytest.mark.parametrize("op", cases.OPS)
def test_a_small_budget_is_hardly_spent_on_twins(op):
    seen = []

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(case=_drawn(op))
    def check(case):
        seen.append(dataclasses.replace(case, seed=0).id)

    check()
    assert len(set(seen)) >= 54, f"{len(set(seen))} different questions in {len(seen)} draws"


class _Scripted:
    """A source of given choices, of which each must be one that was asked for."""

    def __init__(self, *choices):
        self.choices = list(choices)

    def draw_boolean(self, p=0.5):
        assert 0 < p < 1
        choice = self.choices.pop(0)
        assert isinstance(choice, bool)
        return choice

    def draw_integer(self, min_value, max_value):
        choice = self.choices.pop(0)
        assert min_value <= choice <= max_value
        return choice


def test_lengths_are_drawn_near_bounds_or_anywhere():
    assert Draw(_Scripted(False, 77)).near(8, 64, low=1, high=300) == 77
    edges = [Draw(_Scripted(True, i)).near(8, 64, low=8, high=64) for i in range(4)]
    assert edges == [8, 9, 63, 64]
    assert Draw(_Scripted(5)).near(100, low=1, high=9) == 5  # no bound lies within
    with pytest.raises(ValueError, match="low=3 must be at most high=2"):
        Draw(_Scripted()).near(1, low=3, high=2)


def test_what_is_usual_comes_in_half_of_the_draws():
    drawn = [Draw(_Scripted(i)).mostly("usual", ("a", "b", "c")) for i in range(6)]
    assert drawn == ["usual"] * 3 + ["a", "b", "c"]


def test_only_claimed_features_are_chosen_from():
    draw = Draw(_Scripted(True, False))
    assert draw.subset(frozenset({"b", "d"}), ("a", "b", "c", "d")) == {"b"}


def test_inputs_are_kept_for_the_next_subject_up_to_a_limit():
    made = []

    def make(case):
        made.append(case.seed)
        return (("x", torch.zeros(case.kv_len, dtype=torch.uint8)),)

    inputs = remembered(make, limit=10)
    one, two, big = (
        dataclasses.replace(SMALL, seed=seed, kv_len=size)
        for seed, size in ((1, 4), (2, 4), (3, 99))
    )
    assert inputs(one)[0][1] is inputs(one)[0][1]
    inputs(two)
    inputs(one)
    assert made == [1, 2]
    inputs(dataclasses.replace(one, seed=4))  # the one that was asked longest ago goes: two
    inputs(one)
    assert made == [1, 2, 4]
    inputs(two)
    assert made == [1, 2, 4, 2]
    assert inputs(big)[0][1] is inputs(big)[0][1]  # alone above the limit
    inputs(one)
    assert made == [1, 2, 4, 2, 3, 1]


@pytest.mark.parametrize("op", cases.OPS)
def test_features_are_the_optional_fields_and_have_a_meaning(op):
    module = cases.load(op)
    optional = {
        f.name for f in dataclasses.fields(module.CASE) if f.default is not dataclasses.MISSING
    }
    assert optional == set(module.FEATURES)


@pytest.mark.parametrize("op", cases.OPS)
def test_inputs_are_the_same_twice_and_finite(op):
    @settings(max_examples=30, derandomize=True, deadline=None, database=None)
    @given(case=_drawn(op))
    def check(case):
        first = {name: x.clone() for name, x in case.inputs().items()}
        assert changed(first, case.inputs()) is None
        if getattr(case, "poison", None) == "nan":
            return  # asked for, in slots that must not be read
        assert all(x.isfinite().all() for x in first.values() if x.is_floating_point())

    check()


def test_a_stream_gives_these_words_on_every_machine():
    """Pinned once, checked everywhere."""
    digest = hashlib.sha256(values.words(7, "q", 1001).tobytes()).hexdigest()[:16]
    assert digest == "30bea122cefcad17"


def test_splitmix_matches_its_published_vector():
    """The first outputs for seed 0, as in the reference implementation by S. Vigna."""
    assert [int(w) for w in values.splitmix(0, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
def test_draws_fit_float32_exactly(seed):
    x = values.normal(seed, "x", (64,))
    assert torch.equal(x, x.float().double())
    assert float(x.abs().max()) < 3.5


@pytest.mark.parametrize("layout", layouts.NAMES)
def test_a_layout_changes_strides_and_no_value(layout):
    x = values.normal(1, "x", (2, 3, 4, 8)).float()
    laid = layouts.lay_out(x, layout, 99.0)
    assert torch.equal(laid, x)
    if layout in ("swapped", "sliced"):
        assert not laid.is_contiguous()


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match="layout='spiral' is unknown; expected one of contiguous"):
        layouts.lay_out(torch.zeros(1, 1, 1, 1), "spiral", 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "multiple of kv_heads"),
        ({"window": 4}, "window needs causal"),
        ({"causal": True, "window": 0}, "window must be at least 1"),
        ({"kv_lens": (9,)}, "length within the tensor"),
        ({"schedule": (1, 2), "causal": True}, "add up to q_len"),
        ({"values": "lumpy"}, "values must be one of"),
        ({"q_len": 0}, "must be at least 1"),
        ({"alibi": 0.0}, "alibi must be positive"),
    ],
)
def test_a_contradiction_is_refused_with_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"dtype": "float32"}', '{"nonsense": 1}', "\x00"]
)
def test_what_is_no_case_is_refused_with_a_sentence(text):
    with pytest.raises(ValueError, match=r"is not the JSON of a sdpa case.*expected the fields"):
        SdpaCase.from_json(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"causal": True, "window": 6}, "window=6: no key is clipped"),
        ({"causal": True, "q_len": 1, "kv_len": 1}, "causal: no key is hidden"),
        ({"kv_lens": (5,)}, "kv_lens: no key is padding"),
        ({"sinks": -80.0}, "sinks=-80.0: the output rounds to the same bits"),
        ({"alibi": 120.0}, "alibi=120.0: the output rounds to the same bits"),
        ({"softcap": 1e6}, "softcap=1000000.0: the output rounds to the same bits"),
        ({"side": "left"}, "side: nothing is padded"),
        ({"causal": True, "schedule": (2,)}, "schedule: a single step"),
        ({"kv_lens": (0,)}, "no key is visible"),
    ],
)
def test_a_feature_that_cannot_be_seen_makes_the_case_vacuous(change, reason):
    case = dataclasses.replace(SMALL, **change)
    assert (case.vacuous(case.inputs()) or "").startswith(reason)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True, "window": 4},
        {"causal": True, "window": 5},
        {"causal": True, "q_len": 1},
        {"kv_lens": (4,)},
        {"sinks": 0.0},
        {"softcap": 2.0},
        {"alibi": 8.0},
        {"causal": True, "schedule": (1, 1)},
    ],
)
def test_a_feature_that_bites_is_not_vacuous(change):
    case = dataclasses.replace(SMALL, **change)
    assert case.vacuous(case.inputs()) is None


@settings(max_examples=300)
@given(case=_drawn("sdpa"))
def test_lengths_say_what_the_mask_shows(case):
    """What is counted in lengths, against the mask itself."""
    mask = case.inputs()["visible"][:, 0]
    rows = case._rows()
    assert case.dead_rows == bool((~mask.any(-1) & rows).any())

    def alike(**change):
        return torch.equal(mask, dataclasses.replace(case, **change)._visible())

    why = case.vacuous(case.inputs()) or ""
    if case.window is not None:
        others = (None, case.window + 1, max(case.window - 1, 1))
        assert why.startswith("window=") == all(alike(window=w) for w in others)
    elif case.causal and case.q_len == case.kv_len:
        assert why.startswith("causal: ") == alike(causal=False, schedule=())
    if not mask.any():
        assert why


def test_alibi_brings_the_published_slopes_and_the_distances():
    case = dataclasses.replace(SMALL, alibi=8.0, kv_lens=(3,))
    inputs = case.inputs()
    assert inputs["alibi"].dtype == torch.float32
    assert inputs["alibi"].shape == (case.heads,)
    assert torch.equal(inputs["alibi"].double(), alibi_slopes(case.heads))
    assert inputs["distance"].tolist() == [[[[1, 0, -1, -2, -3], [2, 1, 0, -1, -2]]]]


def test_padding_is_poisoned_and_nothing_else():
    case = dataclasses.replace(SMALL, kv_lens=(3,), dtype="bfloat16")
    k = case.inputs()["k"]
    assert bool((k[:, :, 3:].float() == values.poison("bfloat16")).all())
    assert float(k[:, :, :3].abs().max()) < 4


def test_matching_by_field_range_list_and_property():
    assert SMALL.matches({"q_len": 2, "kv_len": {"min": 3, "max": 5}, "dead_rows": False})
    assert not SMALL.matches({"q_len": [3, 4]})
    assert not SMALL.matches({"softcap": {"min": 0.0}})
    assert dataclasses.replace(SMALL, softcap=5.0).matches({"softcap": {"min": 0.0}})
    with pytest.raises(ValueError, match="'colour' is no attribute of SdpaCase"):
        SMALL.matches({"colour": 1})


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        *(("sdpa", "scale", x) for x in (-1.0, 0.0, math.inf, math.nan)),
        *(("sdpa", "softcap", x) for x in (-1.0, 0.0, math.inf, math.nan)),
        *(("sdpa", "sinks", x) for x in (1e39, -1e39, math.inf, math.nan)),
        *(("sdpa", "alibi", x) for x in (0.0, math.inf)),
        *(("bmm", "alpha", x) for x in (math.inf, math.nan)),
        *(("mla", "mscale", x) for x in (0.0, -1.0, math.inf)),
        *(("yarn", "partial", x) for x in (0.0, 0.01, 1.5, -0.5, math.nan)),
        *(("yarn", "base", x) for x in (0.0, -1.0, math.inf)),
        *(("yarn", "factor", x) for x in (0.0, -1.0, math.nan)),
    ],
)
def test_a_number_that_no_op_takes_is_refused(op, name, value):
    """Not asked and then blamed on the subject, or on the program."""
    data = json.loads(next(case for _, case in cases.load(op).PINNED).to_json())
    with pytest.raises(ValueError, match=name):
        cases.load(op).CASE.from_json(json.dumps({**data, name: value}))


def test_a_share_of_the_head_is_whole_pairs():
    data = json.loads(next(case for _, case in cases.load("yarn").PINNED).to_json())
    text = json.dumps({**data, "head_dim": 4, "partial": 0.25})
    with pytest.raises(ValueError, match="rotary_dim=1 must be even"):
        cases.load("yarn").CASE.from_json(text)
