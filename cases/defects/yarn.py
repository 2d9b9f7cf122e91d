"""Wrong versions of rotary embeddings and of what their configs mean."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cases.case import Inputs
from cases.defects import Ask, Defect, Lasting, Misread, Question
from cases.defects._rounding import SHORT, truncated
from cases.yarn import TYPES, YARN_FIELDS, YarnCase
from references import yarn as reference


def _other(change: Callable[[YarnCase], dict[str, Any] | None]) -> Ask:
    """The same inputs under another config; None where `change` is."""

    def ask(case: YarnCase, inputs: Inputs) -> Question | None:
        fields = change(case)
        return None if fields is None else (replace(case, **fields), inputs)

    return ask


def _magnitude(change: Callable[[YarnCase], float | None]) -> Ask:
    """Another magnitude on q and k, the softmax scale as it is."""

    def ask(case: YarnCase, inputs: Inputs) -> Question | None:
        wrong = change(case)
        if wrong is None or wrong == case.rope.attention_factor:
            return None
        return replace(case, attention_factor=wrong), inputs

    return ask


def _twice(case: YarnCase) -> float | None:
    return case.rope.attention_factor**2 if case.yarn or case.longrope else None


def _multiplied(case: YarnCase) -> float | None:
    """The final value taken for a multiplier of what the factor implies."""
    if case.attention_factor is None:
        return None
    return case.attention_factor * replace(case, attention_factor=None).rope.attention_factor


def _ignored(case: YarnCase) -> float | None:
    if case.attention_factor is None:
        return None
    return replace(case, attention_factor=None).rope.attention_factor


def _kept(case: YarnCase) -> float | None:
    """The ratio of mscale and mscale_all_dim counts, where attention_factor stands in its place."""
    if case.attention_factor is None or not (case.mscale and case.mscale_all_dim):
        return None
    ratio = replace(case, attention_factor=None).rope.attention_factor
    return case.attention_factor * ratio / reference.mscale(case.rope.factor)


def _plain_softmax(case: YarnCase, inputs: Inputs) -> Question | None:
    if not case.nope or not case.yarn or not case.mscale_all_dim:
        return None
    keep = {"attention_factor": case.rope.attention_factor, "mscale_all_dim": None}
    return replace(case, **keep), inputs


def _softmax_on_rotation(case: YarnCase, inputs: Inputs) -> Question | None:
    """mscale_all_dim squared is put into the rotation, so only rotated columns get it."""
    if not case.nope or not case.yarn or not case.mscale_all_dim:
        return None
    weight = reference.mscale(case.rope.factor, case.mscale_all_dim)
    keep = {"attention_factor": case.rope.attention_factor * weight, "mscale_all_dim": None}
    return replace(case, **keep), inputs


def _unread(case: YarnCase) -> dict[str, Any] | None:
    """Plain rope with base 10000: what is left when the rope dict has a name nobody reads."""
    if case.rope_type == "default" and case.base == 10000.0:
        return None
    lost = ("factor", "attention_factor", "short_factor", "long_factor", *YARN_FIELDS)
    return {"base": 10000.0} | {name: False for name in TYPES} | {name: None for name in lost}


def _swapped(case: YarnCase) -> dict[str, Any] | None:
    rope = case.rope
    return {"beta_fast": rope.beta_slow, "beta_slow": rope.beta_fast} if case.yarn else None


def _untruncated(case: YarnCase) -> dict[str, Any] | None:
    return {"truncate": True} if case.untruncated else None


def _never_truncated(case: YarnCase) -> dict[str, Any] | None:
    return {"truncate": False} if case.yarn and case.rope.truncate else None


def _table(wrong: Callable[[YarnCase, torch.Tensor], torch.Tensor | None]) -> Ask:
    """Other inverse frequencies [batch, pairs]."""

    def ask(case: YarnCase, inputs: Inputs) -> Question | None:
        table = wrong(case, case.table(inputs))
        return None if table is None else (case, {**inputs, "inv_freq": table})

    return ask


def _half_clamp(case: YarnCase, table: torch.Tensor) -> torch.Tensor | None:
    """The ramp's upper bound clamped to the last pair instead of the last column."""
    if not case.yarn:
        return None
    rope = case.rope
    low, high = reference.correction_range(rope)
    top = rope.rotary_dim // 2 - 1
    if high <= top or low >= top:
        return None
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    ramp = ((index - low) / (top - low)).clamp(0, 1)
    plain = rope.base ** (-2 * index / rope.rotary_dim)
    return (plain * (1 - ramp) + plain / rope.factor * ramp).expand_as(table)


def _factor_under_power(case: YarnCase, table: torch.Tensor) -> torch.Tensor | None:
    """The factor multiplies the base: 1 / (f base)**(2i/d) for the interpolated frequencies."""
    if not case.yarn or case.rope.factor == 1:
        return None
    rope = case.rope
    low, high = reference.correction_range(rope)
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    power = -2 * index / rope.rotary_dim
    return (rope.base**power * (1 - ramp) + (rope.factor * rope.base) ** power * ramp).expand_as(
        table
    )


def _no_scaling(case: YarnCase, table: torch.Tensor) -> torch.Tensor | None:
    if case.rope_type == "default":
        return None
    plain = replace(case.rope, kind="default")
    return reference.inv_freq(plain, 1).expand_as(table)


def _head_in_exponent(case: YarnCase, table: torch.Tensor) -> torch.Tensor | None:
    """The whole head in the exponent where only a part of it is rotated."""
    rope = case.rope
    if rope.rotary_dim == rope.head_dim or rope.kind not in ("default", "linear"):
        return None
    pair = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.head_dim
    return (rope.base**-pair / rope.factor).expand_as(table)


def _lengths(change: Callable[[YarnCase, int], int]) -> Ask:
    """Frequencies chosen by another length than the request's."""

    def wrong(case: YarnCase, table: torch.Tensor) -> torch.Tensor | None:
        if not case.rope.depends_on_length:
            return None
        return reference.per_request(case.rope, [change(case, n) for n in case.lengths])

    return _table(wrong)


def _whole_head(case: YarnCase, inputs: Inputs) -> Question | None:
    """Every column is rotated though partial_rotary_factor says otherwise."""
    if case.partial is None or case.rope_type in ("longrope", "proportional"):
        return None
    return replace(case, partial=None), inputs


def _moved(change: Callable[[YarnCase, str, torch.Tensor], torch.Tensor]) -> Ask:
    """q, k or both at other positions, frequencies as they should be."""

    def ask(case: YarnCase, inputs: Inputs) -> Question | None:
        table = case.table(inputs)
        wrong = {
            f"{name}_angles": reference.angles(
                change(case, name, inputs[f"{name}_positions"]), table
            )
            for name in ("q", "k")
        }
        return case, {**inputs, **wrong}

    return ask


def _only_q(change: Callable[[torch.Tensor], torch.Tensor]) -> Ask:
    return _moved(lambda case, name, at: change(at) if name == "q" else at)


def _no_offset(case: YarnCase, name: str, at: torch.Tensor) -> torch.Tensor:
    return at - at[:, :1] if name == "q" else at


def _first_request(case: YarnCase, name: str, at: torch.Tensor) -> torch.Tensor:
    return at[:1].expand_as(at)


def _one_decode_row(case: YarnCase, inputs: Inputs) -> Question | None:
    """Single-token steps rotate the first request alone."""
    if case.batch == 1 or case.q_len > 1:
        return None
    angles = case.angles(inputs)["q"].clone()
    angles[1:] = 0
    return case, {**inputs, "q_angles": angles}


def _low(what: str) -> Ask:
    """Positions, frequencies or angles pass through bfloat16."""

    def low(x: torch.Tensor) -> torch.Tensor:
        return x.float().bfloat16().double()

    def ask(case: YarnCase, inputs: Inputs) -> Question | None:
        if what == "frequencies":
            return case, {**inputs, "inv_freq": low(case.table(inputs))}
        if what == "angles":
            turned = {f"{name}_angles": low(x) for name, x in case.angles(inputs).items()}
            return case, {**inputs, **turned}
        return _moved(lambda case, name, at: low(at))(case, inputs)

    return ask


def _ends_with_keys(case: YarnCase, inputs: Inputs) -> Question:
    """The offset of the queries is not passed on: the last of them stands at the last key."""
    last = inputs["k_positions"][:, -1:]
    at = last - torch.arange(case.q_len - 1, -1, -1)
    return case, {**inputs, "q_angles": reference.angles(at, case.table(inputs))}


def _few_heads(case: YarnCase, inputs: Inputs) -> Question | None:
    """Query heads beyond the number of key heads pass through: they are turned back beforehand."""
    if case.heads == case.kv_heads:
        return None
    q = inputs["q"].double().clone()
    back = reference.rotate(q, -case.angles(inputs)["q"], case.rope)
    rotated = slice(case.rope.start, case.rope.start + case.rope.rotary_dim)
    back[..., rotated] /= case.rope.attention_factor**2
    q[:, case.kv_heads :] = back[:, case.kv_heads :]
    return case, {**inputs, "q": q}


def _truncated(case: YarnCase, inputs: Inputs) -> Question | None:
    """The question that has the truncated q and k as its answer: both turned by nothing."""
    if not case.rotated or case.dtype not in SHORT:
        return None
    right = case.expected(inputs)
    still = {f"{name}_angles": torch.zeros_like(x) for name, x in case.angles(inputs).items()}
    plain = replace(case, attention_factor=1.0) if case.yarn or case.longrope else case
    return plain, {
        **inputs,
        **still,
        **{name: truncated(right[name], case.dtype) for name in ("q", "k")},
        "inv_freq": case.table(inputs),
        "growth": torch.ones(case.batch, case.q_len),
    }


def _own_scale(case: YarnCase, out: Inputs) -> Inputs:
    return out | ({"scale": case.expected_scale()} if case.composed else {})


def _unrotated(case: YarnCase, inputs: Inputs) -> Question:
    """The rotation's result is thrown away for k."""
    angles = case.angles(inputs)["k"]
    return case, {**inputs, "k_angles": torch.zeros_like(angles)}


def _growth(change: Callable[[YarnCase, Inputs], torch.Tensor]) -> Ask:
    def ask(case: YarnCase, inputs: Inputs) -> Question | None:
        if case.temperature is None:
            return None
        return case, {**inputs, "growth": change(case, inputs)}

    return ask


def _growth_at(case: YarnCase, positions: torch.Tensor) -> torch.Tensor:
    return reference.temperature(positions, case.rope)


# State between calls -------------------------------------------------------------------------


def _scaled_in_place() -> Ask:
    """The magnitude is multiplied into the caller's tensors: the answer is right, once."""

    def ask(case: YarnCase, inputs: Inputs) -> Question | None:
        if case.rope.attention_factor != 1:
            for name in ("q", "k"):
                inputs[name].mul_(case.rope.attention_factor)
        return None

    return ask


def _longest_so_far() -> Ask:
    """The longest request of all calls decides for the ones that follow."""
    longest = [1]

    def ask(case: YarnCase, inputs: Inputs) -> Question | None:
        longest.append(max(longest[-1], *case.lengths))
        if not case.rope.depends_on_length:
            return None
        rows = reference.per_request(case.rope, [longest[-1]] * case.batch)
        return case, {**inputs, "inv_freq": rows}

    return ask


def _table_of_the_width() -> Ask:
    """Tables are kept by the width of the rotation: the first rope of a width serves all."""
    tables: dict[int, torch.Tensor] = {}

    def ask(case: YarnCase, inputs: Inputs) -> Question:
        table = case.table(inputs)
        first = tables.setdefault(table.shape[-1], table[:1])
        return case, {**inputs, "inv_freq": first.expand_as(table)}

    return ask


# Configs misread -----------------------------------------------------------------------------

Config = dict[str, Any]


def _rope_of(change: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """`change` of the rope dict of a full-attention layer, wherever it stands in a config."""

    def reads(config: Config) -> Config:
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.get(name)
        if not rope:
            return config
        if "full_attention" in rope:
            return config | {name: rope | {"full_attention": change(rope["full_attention"])}}
        return config | {name: change(rope)}

    return reads


def _without(*names: str) -> Callable[[Config], Config]:
    return lambda given: {name: value for name, value in given.items() if name not in names}


def _sliding_layers(config: Config) -> Config:
    rope = config.get("rope_parameters") or {}
    if "full_attention" not in rope:
        return config
    return config | {"rope_parameters": rope | {"full_attention": rope["sliding_attention"]}}


def _one_spelling(rope: Config) -> Config:
    return rope if "rope_type" in rope else rope | {"type": "default"}


DEFECTS = (
    Defect(
        name="mscale-twice",
        bugs=(),
        sentence="mscale applied twice",
        question=_magnitude(_twice),
    ),
    Defect(
        name="attention-factor-ignored",
        bugs=("B093",),
        sentence="attention_factor ignored",
        question=_magnitude(_ignored),
    ),
    Defect(
        name="attention-factor-as-multiplier",
        bugs=("B093",),
        sentence="attention_factor multiplied by what the factor implies: mscale applied twice",
        question=_magnitude(_multiplied),
    ),
    Defect(
        name="mscale-kept-beside-attention-factor",
        bugs=(),
        sentence="mscale and mscale_all_dim count although attention_factor is given",
        question=_magnitude(_kept),
    ),
    Defect(
        name="attention-factor-one",
        bugs=(),
        sentence="attention_factor = 1.0 hard-coded: mscale missing from the rotation",
        question=_magnitude(lambda case: 1.0 if case.yarn or case.longrope else None),
    ),
    Defect(
        name="mscale-dropped-when-interleaved",
        bugs=("B137",),
        sentence="mscale dropped for interleaved pairs",
        question=_magnitude(lambda case: 1.0 if case.yarn and case.interleaved else None),
    ),
    Defect(
        name="softmax-mscale-missing",
        bugs=("B088", "B089", "B095"),
        sentence="mscale_all_dim missing from the softmax scale",
        question=_plain_softmax,
    ),
    Defect(
        name="softmax-mscale-on-rotation",
        bugs=("B089",),
        sentence="mscale_all_dim squared applied to the rotated columns alone",
        question=_softmax_on_rotation,
    ),
    Defect(
        name="truncate-ignored",
        bugs=("B132",),
        sentence="truncate = false ignored: the ramp's bounds are rounded to pairs",
        question=_other(_untruncated),
    ),
    Defect(
        name="truncate-missing",
        bugs=("B133", "B134"),
        sentence="the ramp's bounds are not rounded to pairs",
        question=_other(_never_truncated),
    ),
    Defect(
        name="ramp-clamped-to-pairs",
        bugs=("B133",),
        sentence="the ramp's upper bound is clamped to the last pair, not the last column",
        question=_table(_half_clamp),
    ),
    Defect(
        name="beta-swapped",
        bugs=(),
        sentence="beta_fast and beta_slow swapped",
        question=_other(_swapped),
    ),
    Defect(
        name="factor-under-the-power",
        bugs=("B134",),
        sentence="yarn's factor stands under the power",
        question=_table(_factor_under_power),
    ),
    Defect(
        name="scaling-dropped",
        bugs=("B095", "B099"),
        sentence="frequencies of plain rope: the scaling is dropped",
        question=_table(_no_scaling),
    ),
    Defect(
        name="rope-dict-not-read",
        bugs=("B095", "B101"),
        sentence="the rope dict is not read: plain rope with base 10000",
        question=_other(_unread),
    ),
    Defect(
        name="base-default",
        bugs=("B101",),
        sentence="rope_theta not found: base 10000",
        question=_other(lambda case: None if case.base == 10000.0 else {"base": 10000.0}),
    ),
    Defect(
        name="base-off-by-0.01%",
        bugs=(),
        sentence="base off by 0.01 %",
        question=_other(lambda case: {"base": case.base * 1.0001}),
    ),
    Defect(
        name="pairs-swapped",
        bugs=("B113", "B114"),
        sentence="interleaved pairs for halves, or halves for interleaved pairs",
        question=_other(lambda case: {"interleaved": not case.interleaved}),
    ),
    Defect(
        name="partial-ignored",
        bugs=("B118", "B138"),
        sentence="partial_rotary_factor ignored: the whole head is rotated",
        question=_whole_head,
    ),
    Defect(
        name="head-dim-in-exponent",
        bugs=("B117",),
        sentence="frequencies spread over the whole head instead of its rotated part",
        question=_table(_head_in_exponent),
    ),
    Defect(
        name="position-plus-one",
        bugs=(),
        sentence="query positions off by one",
        question=_only_q(lambda at: at + 1),
    ),
    Defect(
        name="offset-dropped",
        bugs=("B126",),
        sentence="query positions start at 0: the offset is dropped",
        question=_moved(_no_offset),
    ),
    Defect(
        name="positions-doubled",
        bugs=("B109",),
        sentence="positions doubled",
        question=_moved(lambda case, name, at: 2 * at),
    ),
    Defect(
        name="offset-of-the-first-request",
        bugs=("B125",),
        sentence="every request is given the first one's positions",
        question=_moved(_first_request),
    ),
    Defect(
        name="first-request-alone-in-decode",
        bugs=("B122",),
        sentence="a single-token step rotates the first request alone",
        question=_one_decode_row,
    ),
    Defect(
        name="keys-not-rotated",
        bugs=("B131",),
        sentence="keys are not rotated",
        question=_unrotated,
    ),
    Defect(
        name="angles-bfloat16",
        bugs=("B119",),
        sentence="angles rounded to bfloat16",
        question=_low("angles"),
    ),
    Defect(
        name="positions-bfloat16",
        bugs=("B119", "B120"),
        sentence="positions rounded to bfloat16",
        question=_low("positions"),
    ),
    Defect(
        name="frequencies-bfloat16",
        bugs=("B119", "B120"),
        sentence="frequencies rounded to bfloat16",
        question=_low("frequencies"),
    ),
    Defect(
        name="long-at-the-boundary",
        bugs=("B102",),
        sentence="longrope is long at the original length already",
        question=_lengths(
            lambda case, n: n + 1 if case.longrope and n == case.rope.original_max else n
        ),
    ),
    Defect(
        name="always-long",
        bugs=("B103", "B104"),
        sentence="long factors at every length",
        question=_lengths(lambda case, n: max(n, int(case.rope.original_max) + 1)),
    ),
    Defect(
        name="length-without-new-tokens",
        bugs=("B107",),
        sentence="the length that decides leaves out the new tokens",
        question=_lengths(lambda case, n: max(1, n - case.q_len) if case.longrope else n),
    ),
    Defect(
        name="longest-request-decides",
        bugs=(),
        sentence="the longest request of the batch decides for all",
        question=_lengths(lambda case, n: max(case.lengths)),
    ),
    Defect(
        name="dynamic-base-fixed",
        bugs=("B108",),
        sentence="dynamic rope has the base of its full extension at every length",
        question=_lengths(
            lambda case, n: math.ceil(case.rope.factor * case.max_positions) if case.dynamic else n
        ),
    ),
    Defect(
        name="temperature-ignored",
        bugs=(),
        sentence="query temperature ignored",
        question=_growth(lambda case, inputs: torch.ones(case.batch, case.q_len)),
    ),
    Defect(
        name="temperature-of-the-first-request",
        bugs=("B124",),
        sentence="query temperature of the first request for all",
        question=_growth(
            lambda case, inputs: _growth_at(case, inputs["q_positions"][:1].expand(case.batch, -1))
        ),
    ),
    Defect(
        name="temperature-one-ahead",
        bugs=(),
        sentence="query temperature counts positions from 1, as Llama 4's own does",
        question=_growth(lambda case, inputs: _growth_at(case, inputs["q_positions"] + 1)),
    ),
    Defect(
        name="frequencies-zero",
        bugs=("B100",),
        sentence="inverse frequencies are zero: their buffer was never filled",
        question=_table(lambda case, table: torch.zeros_like(table)),
    ),
    Defect(
        name="queries-end-with-keys",
        bugs=("B129",),
        sentence="query offset not passed on: the last query stands at the last key",
        question=_ends_with_keys,
    ),
    Defect(
        name="heads-beyond-keys-not-rotated",
        bugs=("B130",),
        sentence="query heads beyond the number of key heads are not rotated",
        question=_few_heads,
    ),
    Defect(
        name="truncated",
        bugs=(),
        sentence="rotated q and k truncated instead of rounded",
        question=_truncated,
        answer_of=_own_scale,
        rounding=True,
        listed=False,
    ),
)
"""The fault dictionary: each is planted by the tests and looked for in every residual."""

LASTING = (
    Lasting(
        name="input-scaled-in-place",
        bugs=("B123",),
        sentence="q and k are multiplied by mscale in place: whoever uses them again has it twice",
        begin=_scaled_in_place,
    ),
    Lasting(
        name="longest-call-decides",
        bugs=("B108",),
        sentence="the longest request of earlier calls decides on the frequencies",
        begin=_longest_so_far,
    ),
    Lasting(
        name="table-kept-by-width",
        bugs=(),
        sentence="frequencies of an earlier rope of the same width",
        begin=_table_of_the_width,
    ),
)

MISREAD = (
    Misread(
        name="type-spelling-unknown",
        bugs=("B095",),
        sentence="config: `type` not known as a spelling of `rope_type`",
        reads=_rope_of(_one_spelling),
    ),
    Misread(
        name="theta-at-top-unknown",
        bugs=("B101",),
        sentence="config: rope_theta beside the rope dict not read",
        reads=_without("rope_theta"),
    ),
    Misread(
        name="rope-of-the-sliding-layers",
        bugs=(),
        sentence="config: rope of another layer type read",
        reads=_sliding_layers,
    ),
    Misread(
        name="original-at-top-unknown",
        bugs=(),
        sentence="config: original_max_position_embeddings beside the rope dict not read",
        reads=_without("original_max_position_embeddings"),
    ),
    Misread(
        name="attention-factor-unknown",
        bugs=("B093",),
        sentence="config: attention_factor looked for under another name",
        reads=_rope_of(_without("attention_factor")),
    ),
    Misread(
        name="softmax-mscale-unread",
        bugs=("B088", "B089"),
        sentence="config: mscale_all_dim not read",
        reads=_rope_of(_without("mscale_all_dim")),
    ),
    Misread(
        name="truncate-unread",
        bugs=("B132",),
        sentence="config: truncate not passed on",
        reads=_rope_of(_without("truncate")),
    ),
    Misread(
        name="partial-in-rope-dict-unknown",
        bugs=("B118",),
        sentence="config: partial_rotary_factor in the rope dict not read",
        reads=_rope_of(_without("partial_rotary_factor")),
    ),
)
"""Configs as a wrong translator reads them; what it does with them is right."""
