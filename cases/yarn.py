"""Rope configs and rotations: what can be asked, how it is drawn, and configs of real models."""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from cases import values
from cases.case import Case, Inputs
from cases.drawing import Draw, drawn
from cases.memory import remembered
from references import yarn as reference

TYPES = ("yarn", "llama3", "linear", "dynamic", "longrope", "proportional")
"""Rope types other than the default: at most one of these fields is on."""

YARN_FIELDS = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
"""Optional fields of a rope dict that only yarn reads."""

OUTPUTS = ("frequencies", "composed", "rotated")
"""Fields that ask for more than the logits."""

FEATURES = {
    "yarn": "rope type yarn: frequencies blended by a ramp, q and k multiplied by mscale",
    "llama3": "rope type llama3: low frequencies divided, high ones kept, a ramp between them",
    "linear": "rope type linear: positions divided by the factor",
    "dynamic": "rope type dynamic: the base grows with the request's length",
    "longrope": "rope type longrope: one divisor per pair, another set beyond the original length",
    "proportional": "rope type proportional: few frequencies over pairs of the whole head",
    "factor": "the context extension factor",
    "original_max": "original_max_position_embeddings: context before the extension",
    "beta_fast": "turns within the original context from which yarn keeps a frequency",
    "beta_slow": "turns below which yarn divides a frequency by the factor",
    "truncate": "whether yarn's ramp bounds are rounded to pairs (default true)",
    "mscale": "weight of ln(factor) in the numerator of yarn's magnitude",
    "mscale_all_dim": "the same in its denominator, and in DeepSeek's softmax scale",
    "attention_factor": "the final magnitude of q and k, in place of what the factor implies",
    "low_freq_factor": "llama3: turns below which a frequency is divided",
    "high_freq_factor": "llama3: turns above which a frequency is kept",
    "short_factor": "longrope: divisors up to the original length",
    "long_factor": "longrope: divisors beyond it",
    "temperature": "llama_4_scaling_beta: queries grow with ln(1 + floor(pos / original))",
    "partial": "partial_rotary_factor: the share of the head that is rotated, from column 0",
    "interleaved": "pairs (2i, 2i+1) are rotated instead of (i, i + half)",
    "nope": "DeepSeek: so many columns pass through before the rotated ones; one shared key head",
    "old_names": "rope_scaling and rope_theta (transformers 4) instead of rope_parameters (5)",
    "type_key": "the type stands under `type`, or under both names, instead of `rope_type`",
    "nested": "one rope dict per layer type",
    "nulls": "fields that are not set are written as null",
    "original_at_top": "original_max_position_embeddings stands beside the rope dict (Phi-3)",
    "scattered": "query positions in no order, with gaps, instead of a run from the offset",
    "frequencies": "the inverse frequencies are returned too",
    "composed": "the composed logit scale is returned too: [rotated columns, passed columns]",
    "rotated": "q and k after rotation, magnitude and temperature are returned too",
}
"""Every optional field, with its meaning."""

FILLS = ("normal", "small", "loud", "outlier", "positive", "grid", "zeros")
POSITION_PROBE = "position_probe"
"""A fill that `cases.probes` reads back: head 2i of q lies along the first column of a pair, head
2i + 1 along its second, and k along the first column of all pairs, so that their logits are cosine
and sine of the angle between them: see `probed_pairs`."""
ORIGINALS = (4096, 8192, 2048, 16384, 32768, 65536, 131072)
STEEP = (10000.0, 131072)
"""A base and an original context with which the ramp of yarn reaches beyond the last pair."""
FACTORS = (32.0, 4.0, 40.0, 128.0, 1.05, 8.0, 16.0, 64.0, 2.5, 1.0)
BASES = (10000.0, 500000.0, 1000000.0, 150000.0, 50000.0, 5000000.0)
DTYPES = ("float32", "bfloat16", "float16")
FAR = 1_000_000
"""The largest position asked for."""


@dataclass(frozen=True, kw_only=True)
class YarnCase(Case):
    """q [batch, heads, q_len, head_dim] and k [batch, kv_heads, kv_len, head_dim], to be rotated.

    `offsets` and `key_offsets` are the positions of each request's first query and first key, in
    tokens; both run on by one. `config()` is the config.json that the fields stand for.

    Raises:
        ValueError: fields that contradict each other.
    """

    op: ClassVar[str] = "yarn"
    values: str
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    base: float
    max_positions: int
    offsets: tuple[int, ...]
    key_offsets: tuple[int, ...]
    yarn: bool = False
    llama3: bool = False
    linear: bool = False
    dynamic: bool = False
    longrope: bool = False
    proportional: bool = False
    factor: float | None = None
    original_max: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    temperature: float | None = None
    partial: float | None = None
    interleaved: bool = False
    nope: int = 0
    old_names: bool = False
    type_key: str = "rope_type"
    nested: bool = False
    nulls: bool = False
    original_at_top: bool = False
    scattered: bool = False
    frequencies: bool = False
    composed: bool = False
    rotated: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"{what}; got {self.to_json()}")

        fills = (*FILLS, POSITION_PROBE)
        need(self.values in fills, f"values must be one of {', '.join(fills)}")
        sizes = (self.batch, self.q_len, self.kv_len, self.heads, self.kv_heads)
        need(min(sizes) >= 1, "batch, lengths and heads must be at least 1")
        need(self.heads % self.kv_heads == 0, "heads must be a multiple of kv_heads")
        need(self.head_dim >= 4 and self.head_dim % 2 == 0, "head_dim must be even, at least 4")
        need(sum(getattr(self, name) for name in TYPES) <= 1, "at most one rope type may be on")
        for name in ("offsets", "key_offsets"):
            given = getattr(self, name)
            need(len(given) == self.batch, f"{name} must give each request a position")
            need(min(given) >= 0, f"{name} must be at least 0")
        need(self.type_key in ("rope_type", "type", "both"), "type_key: rope_type, type or both")
        need(not self.nope or self.kv_heads == 1, "nope needs one key head")
        need(not (self.nope and self.partial), "nope excludes partial")
        for name in ("base", "factor"):
            x = getattr(self, name)
            need(x is None or (x > 0 and math.isfinite(x)), f"{name} must be positive and finite")
        need(min(self.max_positions, self.original_max or 1) >= 1, "contexts must be at least 1")
        need(self.partial is None or 0 < self.partial <= 1, "partial is a share of the head")
        need(not (self.nested and self.old_names), "nested needs the new names")
        need(not (self.nested and self.original_at_top), "nested excludes original_at_top")
        try:
            read = self.rope
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ValueError(f"no rope: {error}; got {self.to_json()}") from error
        need(math.isfinite(read.attention_factor), "attention factor must be finite")

    @property
    def rope_type(self) -> str:
        return next((name for name in TYPES if getattr(self, name)), "default")

    @property
    def model_type(self) -> str:
        """A model family whose configs look like this one."""
        if self.nope:
            return "deepseek_v3"
        if self.nested:
            return "laguna"
        if self.temperature is not None:
            return "ministral3"
        if self.interleaved:
            return "llama4_text"
        return "phi3" if self.longrope or self.partial is not None else "llama"

    @property
    def sets_attention_factor(self) -> bool:
        """attention_factor is given and differs from what the engine would take without it."""
        other = replace(self, attention_factor=None).rope.attention_factor
        return self.attention_factor is not None and self.rope.attention_factor != other

    @property
    def untruncated(self) -> bool:
        """yarn with ramp bounds between pairs."""
        return self.yarn and self.truncate is False

    @property
    def lone_mscale(self) -> bool:
        """yarn with one of mscale and mscale_all_dim, which then counts for nothing in the rope."""
        return self.yarn and bool(self.mscale) != bool(self.mscale_all_dim)

    @property
    def mixed_lengths(self) -> bool:
        """Requests of one batch that need different frequencies."""
        rope, lengths = self.rope, self.lengths
        rows = reference.per_request(rope, lengths)
        return rope.depends_on_length and not torch.equal(rows, rows[:1].expand_as(rows))

    @property
    def short_longrope(self) -> bool:
        """longrope with a request that its original context holds."""
        return self.longrope and min(self.lengths) <= self.rope.original_max

    @property
    def first_long(self) -> bool:
        """longrope, the longest request by one token beyond what its original context holds."""
        return self.longrope and max(self.lengths) == self.rope.original_max + 1

    @property
    def aligned(self) -> bool:
        """All requests have the same offsets."""
        return len(set(self.offsets)) == 1 and len(set(self.key_offsets)) == 1

    @property
    def far(self) -> int:
        """The largest position."""
        return max(self.lengths) - 1

    @property
    def structured(self) -> bool:
        return self.values not in values.INDEPENDENT

    @property
    def work(self) -> int:
        return self.batch * self.heads * self.q_len * self.kv_len * self.head_dim

    @functools.cached_property
    def rope(self) -> reference.Rope:
        return reference.read(self.config(), "full_attention" if self.nested else None)

    @property
    def layer_type(self) -> str | None:
        return "full_attention" if self.nested else None

    def config(self) -> dict[str, Any]:
        """The config.json of a model with this rope, as its text model's dict."""
        rope = self._rope_dict()
        top: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.heads * self.head_dim,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.max_positions,
        }
        if self.nope:
            top |= {"qk_nope_head_dim": self.nope, "qk_rope_head_dim": self.head_dim - self.nope}
        else:
            top["head_dim"] = self.head_dim
        if self.nope or self.interleaved:
            top["rope_interleave"] = self.interleaved
        if self.original_at_top and self.original_max is not None:
            top["original_max_position_embeddings"] = self.original_max
        if self.old_names:
            plain = self.rope_type == "default" and self.temperature is None
            if not plain or self.nulls:
                top["rope_scaling"] = None if plain else rope
            if self.partial is not None:
                top["partial_rotary_factor"] = self.partial
            return top | {"rope_theta": self.base}
        rope["rope_theta"] = self.base
        if self.partial is not None:
            rope["partial_rotary_factor"] = self.partial
        if not self.nested:
            return top | {"rope_parameters": rope}
        other = {"rope_type": "default", "rope_theta": 10000.0}
        return top | {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": rope, "sliding_attention": other},
        }

    def _rope_dict(self) -> dict[str, Any]:
        rope: dict[str, Any] = {}
        for key in ("rope_type", "type"):
            if self.type_key in (key, "both"):
                rope[key] = self.rope_type
        fields: dict[str, Any] = {"factor": self.factor}
        if not self.original_at_top:
            fields["original_max_position_embeddings"] = self.original_max
        nullable = frozenset[str]()
        if self.yarn:
            fields |= {name: getattr(self, name) for name in YARN_FIELDS}
            fields["attention_factor"] = self.attention_factor
            nullable = frozenset(YARN_FIELDS) - {"truncate"} | {"attention_factor"}
        elif self.longrope:
            for name in ("short_factor", "long_factor"):
                given = getattr(self, name)
                fields[name] = None if given is None else list(given)
            fields["attention_factor"] = self.attention_factor
            nullable = frozenset({"attention_factor", "factor"})
        elif self.llama3:
            fields["low_freq_factor"] = self.low_freq_factor
            fields["high_freq_factor"] = self.high_freq_factor
        fields["llama_4_scaling_beta"] = self.temperature
        for name, value in fields.items():
            if value is not None or (self.nulls and name in nullable):
                rope[name] = value
        return rope

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request: its largest position + 1."""
        q, k = self._positions()
        return tuple(int(max(a.max(), b.max())) + 1 for a, b in zip(q, k, strict=True))

    def output_dtypes(self) -> Mapping[str, str]:
        out = {"logits": "float32"}
        if self.frequencies:
            out["inv_freq"] = "float32"
        if self.composed:
            out["scale"] = "float32"
        return out | ({"q": self.dtype, "k": self.dtype} if self.rotated else {})

    def output_shapes(self) -> Mapping[str, tuple[int, ...]]:
        q = (self.batch, self.heads, self.q_len, self.head_dim)
        k = (self.batch, self.kv_heads, self.kv_len, self.head_dim)
        shapes = {
            "logits": (*q[:-1], self.kv_len),
            "inv_freq": (self.batch, self.head_dim // 2),
            "scale": (2,),
            "q": q,
            "k": k,
        }
        return {name: shapes[name] for name in self.output_dtypes()}

    def axes(self) -> Mapping[str, tuple[str, ...]]:
        return {
            "logits": ("request", "head", "query", "key"),
            "inv_freq": ("request", "pair"),
            "scale": ("part",),
            "q": ("request", "head", "query", "column"),
            "k": ("request", "key head", "key", "column"),
        }

    def place(self, output: str, where: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        named = super().place(output, where)
        for name, positions in zip(("query", "key"), self._positions(), strict=True):
            if name in named:
                named[f"{name} position"] = positions[named["request"], named[name]]
        if "column" in named:
            named["pair"] = self._pair(named["column"])
        return named

    def _pair(self, column: torch.Tensor) -> torch.Tensor:
        """The pair that each column is rotated in; -1: it passes through."""
        rotary, column = self.rope.rotary_dim, column - self.rope.start
        pair = column // 2 if self.interleaved else column % (rotary // 2)
        return torch.where((column >= 0) & (column < rotary), pair, -1)

    def inputs(self) -> Inputs:
        """q, k and the positions of each, int64 [batch, len]."""
        return dict(_inputs(self))

    def expected(self, inputs: Inputs) -> Inputs:
        """What the reference says.

        Fault dictionaries may add `inv_freq`, `q_angles`, `k_angles` or `growth` (the query
        temperature) to the inputs: they stand for what a faulty engine has in their place.
        """
        rope = self.rope
        turned = self.angles(inputs)
        q, k = (reference.rotate(inputs[name], turned[name], rope) for name in ("q", "k"))
        q = q * self.growth(inputs)[:, None, :, None]
        out = {"logits": reference.logits(q, k, rope)}
        if self.frequencies:
            out["inv_freq"] = self.padded(self.table(inputs))
        if self.composed:
            out["scale"] = self.expected_scale()
        return out | ({"q": q, "k": k} if self.rotated else {})

    def expected_scale(self) -> torch.Tensor:
        """The composed scale, float64 [2]: of a rotated column and of a passed one."""
        return torch.tensor(reference.composed_scale(self.rope), dtype=torch.float64)

    def table(self, inputs: Inputs) -> torch.Tensor:
        """Inverse frequencies, float64 [batch, rotary_dim / 2]."""
        given = inputs.get("inv_freq")
        return reference.per_request(self.rope, self.lengths) if given is None else given.double()

    def angles(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Angles of q and k in radians, float64 [batch, len, rotary_dim / 2]."""
        table = self.table(inputs)
        return {
            name: inputs[f"{name}_angles"].double()
            if f"{name}_angles" in inputs
            else reference.angles(inputs[f"{name}_positions"], table)
            for name in ("q", "k")
        }

    def growth(self, inputs: Inputs) -> torch.Tensor:
        """The query temperature, float64 [batch, q_len]."""
        given = inputs.get("growth")
        if given is not None:
            return given.double()
        return reference.temperature(inputs["q_positions"], self.rope)

    def padded(self, table: torch.Tensor) -> torch.Tensor:
        """A table [batch, n] as the output `inv_freq`: pairs that do not turn have frequency 0."""
        return torch.nn.functional.pad(table, (0, self.head_dim // 2 - table.shape[-1]))

    def vacuous(self, inputs: Inputs) -> str | None:
        still = not bool(inputs["q_positions"].any()) and not bool(inputs["k_positions"].any())
        if still and not (self.frequencies or self.composed):
            return "every position is 0: nothing turns"
        if self.temperature is not None and bool((self.growth(inputs) == 1).all()):
            return f"temperature={self.temperature}: every query is below original_max"
        if self.scattered and self.q_len == 1:
            return "scattered: a single query"
        return None

    def wording(self, observed: Mapping[str, torch.Tensor]) -> str | None:
        """A wrong composed scale as a sentence: what it is, should be, and which mistake makes it.

        In terms of the magnitude that q and k carry: the square root of the scale over the
        1/sqrt(head_dim) of plain attention.
        """
        scale = observed.get("scale")
        if scale is None or not bool(scale.isfinite().all()) or not bool((scale > 0).all()):
            return None
        return wrong_composition(self.rope, float(scale[0]))

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (
            torch.tensor(first)[:, None] + torch.arange(count)
            for first, count in ((self.offsets, self.q_len), (self.key_offsets, self.kv_len))
        )
        if self.scattered:
            gaps = values.integers(self.seed, "gaps", (self.batch, self.q_len), 0, 97)
            q = (torch.tensor(self.offsets)[:, None] + gaps).flip(-1)
        return q, k


COMPOSED = 2.0**-16
"""Closeness in which a composition is recognised: mistakes are told apart at factor 1.05 (0.5 %),
and 2**-16 is far above the float32 roundings of a scale."""


def wrong_composition(rope: reference.Rope, scale: float) -> str | None:
    """What is wrong with the composed scale of the rotated columns, or None where nothing is."""
    plain = rope.head_dim**-0.5
    right, got = (math.sqrt(s / plain) for s in (reference.composed_scale(rope)[0], scale))
    if abs(got - right) <= COMPOSED * right:
        return None
    magnitude = rope.attention_factor
    softmax = math.sqrt(rope.softmax_scale / plain)
    implied = reference.mscale(rope.factor) if rope.kind == "yarn" else 1.0
    mistakes = (
        ("mscale applied twice", magnitude * right),
        ("attention_factor ignored", implied * softmax),
        ("mscale applied twice", magnitude * implied * softmax),
        ("mscale dropped from the softmax scale", magnitude),
        ("mscale of the softmax scale applied twice", right * softmax),
        ("mscale missing", softmax),
        ("no mscale at all", 1.0),
        ("mscale applied to one of q and k only", softmax * math.sqrt(magnitude)),
        ("the softmax scale missing", right / math.sqrt(plain)),
        ("the softmax scale applied twice", right * math.sqrt(plain)),
    )
    cause = next((why for why, m in mistakes if abs(got - m) <= COMPOSED * m), "cause unknown")
    return (
        f"logits are scaled by {got:.4f} instead of {right:.4f} on each side "
        f"({got**2:.4f} instead of {right**2:.4f} in all): {cause}"
    )


@remembered
def _inputs(case: YarnCase) -> tuple[tuple[str, torch.Tensor], ...]:
    q_positions, k_positions = case._positions()
    shapes = (
        ("q", (case.batch, case.heads, case.q_len, case.head_dim)),
        ("k", (case.batch, case.kv_heads, case.kv_len, case.head_dim)),
    )
    out = {name: values.cast(_filled(case, name, shape), case.dtype) for name, shape in shapes}
    return (*out.items(), ("q_positions", q_positions), ("k_positions", k_positions))


def _filled(case: YarnCase, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    x = values.normal(case.seed, name, shape)
    match case.values:
        case "small":
            x = x / 64
        case "loud":
            x = x * 16
        case "outlier":
            x[..., 1] *= 32
        case "positive":
            x = x.abs()
        case "grid":
            x = (x * 2).round() / 2
        case "zeros":
            x[..., ::3] = 0
        case _ if case.values == POSITION_PROBE:
            x = torch.zeros(shape, dtype=torch.float64)
            if name == "k":
                x[..., pair_columns(case)[0]] = 1
            for head, pair in enumerate(probed_pairs(case)) if name == "q" else ():
                x[:, head, :, pair_columns(case)[head % 2, pair]] = 1
    return x


def pair_columns(case: YarnCase) -> torch.Tensor:
    """int64 [2, pairs]: the first and the second column of every rotated pair."""
    rope = case.rope
    columns = rope.start + torch.arange(rope.rotary_dim)
    return columns.view(-1, 2).T if rope.interleaved else columns.view(2, -1)


def probed_pairs(case: YarnCase) -> tuple[int, ...]:
    """The pair that each head of a position probe lies in: from fast to slow, two heads to each."""
    pairs, shown = case.rope.rotary_dim // 2, max(1, case.heads // 2)
    return tuple(head // 2 * max(1, pairs // shown) % pairs for head in range(case.heads))


THEMES = {
    "yarn on a steep base": frozenset[str](),
    "yarn as DeepSeek has it": frozenset({"nope", "mscale", "mscale_all_dim"}),
    "yarn with its magnitude given": frozenset({"attention_factor", "mscale", "mscale_all_dim"}),
    "yarn between pairs": frozenset({"truncate", "mscale"}),
    "longrope at its boundary": frozenset[str](),
}
"""What to ask besides one rope type after the other (the first word is the type), with the features
it needs: each of these has gone wrong, and free draws come to them too rarely."""


def _themes(claims: frozenset[str], always: frozenset[str]) -> tuple[str, ...]:
    """Rope types and themes that the claims allow, plain rope first."""
    types = [name for name in TYPES if name in (always & set(TYPES) or claims)]
    more = [name for name in THEMES if name.split()[0] in types and THEMES[name] <= claims]
    kinds = (*types, *more)
    return kinds if always & set(TYPES) else ("default", *kinds)


class Claims(frozenset[str]):
    """Features that a subject supports, with those that each of its drawn cases has.

    A model with latent attention, say, has no other rope: `always=("nope",)`. Equal only to claims
    that draw the same cases.

    Raises:
        ValueError: not a feature.
    """

    always: frozenset[str]

    def __new__(cls, names: Iterable[str], *, always: Iterable[str] = ()) -> Self:
        always = frozenset(always)
        self = super().__new__(cls, frozenset(names) | always)
        if unknown := self - set(FEATURES):
            raise ValueError(f"{sorted(unknown)} are no features; known: {', '.join(FEATURES)}")
        self.always = always
        return self

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and getattr(other, "always", frozenset()) == self.always

    def __hash__(self) -> int:
        return hash((frozenset(self), self.always))

    def lacking(self, case: YarnCase) -> str | None:
        """The refusal of a case without a feature that this subject always has, or None."""
        missing = sorted(name for name in self.always if not getattr(case, name))
        return f"only asked with {', '.join(missing)}" if missing else None


@drawn
def strategy(
    draw: Draw, claims: frozenset[str], dtypes: tuple[str, ...], large: bool = False
) -> YarnCase:
    """Cases that use only claimed features; shrinks towards few, small and plain rope.

    claims: names from FEATURES; `Claims` for those that every case must have. large: nightly sizes.
    """
    always = getattr(claims, "always", frozenset[str]())
    theme = draw.among(*_themes(claims, always))
    kind = theme.split()[0]
    on = draw.subset(claims, [name for name in FEATURES if name not in TYPES])
    on |= always | THEMES.get(theme, frozenset())
    head_dim = draw.among(64, 16, 32, 96, 128, *((80, 256) if large else ()))
    q_len = 1 if draw.either() else draw.between(1, 8 if large else 4)
    nope = draw.among(head_dim, head_dim // 2, 2 * head_dim) if "nope" in on else 0
    fields: dict[str, Any] = {name: True for name in (*OUTPUTS, "nulls") if name in on}
    if nope:  # the rotated part is whole
        head_dim += nope
        on, kind = on - {"partial"}, "default" if kind == "proportional" else kind
        fields["nope"] = nope
    if "interleaved" in on:
        fields["interleaved"] = True
    kv_heads = 1 if nope else draw.among(*(1, 2, 3) if large else (1, 2))
    original, base = draw.among(*ORIGINALS), draw.among(*BASES)
    if theme == "yarn on a steep base":
        base, original = STEEP
    fields |= _parameters(draw, kind, on, claims, head_dim - nope, original)
    if "temperature" in on:
        fields |= {"temperature": draw.among(0.1, 0.25), "original_max": original}
    if "original_at_top" in always:
        fields.setdefault("original_max", original)
    if "scattered" in on and q_len > 1:
        fields["scattered"] = True
    fields |= _spelling(draw, on, fields)
    factor = fields.get("factor") or 4.0
    longest = max(original, int(original * factor)) if kind != "dynamic" else original
    if fields.get("longrope") and "factor" not in fields:
        longest = original * draw.among(32, 1, 4)
    batch = draw.between(1, 3)
    kv_len = draw.between(1, 12 if large else 5)
    same = draw.either()
    short = original - q_len  # where a request starts whose last position is the last short one

    def place() -> int:
        if theme == "longrope at its boundary":
            return draw.among(short, short + 1)
        if draw.either():
            return draw.near(short, low=0, high=FAR - 512)
        return draw.among(5, 1, 0, 255, 300, 4093, 70000, 2**18 - 1, FAR - 512)

    offsets = tuple(place() for _ in range(1 if same else batch))
    if "temperature" in on:  # a query beyond the original context
        beyond = draw.near(original, 2 * original, low=original, high=FAR - 512)
        offsets = (beyond, *offsets[1:])
    keys = tuple(draw.among(0, max(0, o + q_len - kv_len), o // 2, min(3, o)) for o in offsets)
    return YarnCase(
        dtype=draw.among(*dtypes),
        seed=draw.seed(),
        values=draw.mostly("normal", FILLS),
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=kv_heads * draw.among(1, 2, 3),
        kv_heads=kv_heads,
        head_dim=head_dim,
        base=base,
        max_positions=longest,
        offsets=offsets * (batch if same else 1),
        key_offsets=keys * (batch if same else 1),
        **fields,
    )


def _parameters(
    draw: Draw,
    kind: str,
    on: frozenset[str],
    claims: frozenset[str],
    head_dim: int,
    original: int,
) -> dict[str, Any]:
    """The fields of a rope dict of one type; what the type requires is there whatever `on` says."""
    fields: dict[str, Any] = {} if kind == "default" else {kind: True}
    partial = "partial" in on and (head_dim * 0.5) % 4 == 0
    if partial or (kind == "proportional" and "partial" in claims):
        fields["partial"] = draw.among(*(0.5, 0.25) if head_dim % 16 == 0 else (0.5,))
    if kind in ("yarn", "llama3", "linear", "dynamic") or (
        kind == "proportional" and "factor" in on
    ):
        fields["factor"] = draw.among(*FACTORS)
    if kind in ("yarn", "llama3", "longrope"):
        fields["original_max"] = original
    if kind == "yarn":
        if "beta_fast" in on:
            fields["beta_fast"] = draw.among(32.0, 64.0, 16.0)
        if "beta_slow" in on:
            fields["beta_slow"] = draw.among(1.0, 2.0, 0.5)
        if "truncate" in on:
            fields["truncate"] = draw.among(False, True, False)
        fields |= _mscales(draw, on)
        if "attention_factor" in on:
            implied = reference.mscale(fields["factor"])
            fields["attention_factor"] = draw.among(1.0, 1.1, implied, 1.4852)
    elif kind == "llama3":
        fields["low_freq_factor"] = draw.among(1.0, 2.0)
        fields["high_freq_factor"] = draw.among(4.0, 8.0)
    elif kind == "longrope":
        angles = int(head_dim * fields.get("partial", 1.0)) // 2
        low, high = (
            draw.among((1.0, 1.25), (1.05, 2.0)),
            draw.among((1.0, 64.0), (1.1, 8.0), (4.0, 40.0)),
        )
        fields["short_factor"] = divisors(*low, angles)
        fields["long_factor"] = divisors(*high, angles)
        if "factor" in on:
            fields["factor"] = draw.among(32.0, 4.0, 1.0)
        if "attention_factor" in on:
            fields["attention_factor"] = draw.among(1.0, 1.1, 1.19)
    return fields


def _mscales(draw: Draw, on: frozenset[str]) -> dict[str, float]:
    """mscale and mscale_all_dim: mostly both or none, as in published configs."""
    asked = on & {"mscale", "mscale_all_dim"}
    if len(asked) < 2 and draw.among(True, True, False):
        return {}
    weights = {"mscale": (1.0, 0.707, 1.2), "mscale_all_dim": (1.0, 0.707, 0.8)}
    return {name: draw.among(*weights[name]) for name in sorted(asked)}


def _spelling(draw: Draw, on: frozenset[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """How the config is written."""
    out: dict[str, Any] = {}
    if "nested" in on:
        return {"nested": True} | ({"type_key": "both"} if "type_key" in on else {})
    if "old_names" in on:
        out["old_names"] = True
    if "type_key" in on:
        out["type_key"] = draw.among("type", "both")
    if "original_at_top" in on and "original_max" in fields:
        out["original_at_top"] = True
    return out


def divisors(first: float, last: float, count: int) -> tuple[float, ...]:
    """`count` numbers from `first` to `last` as longrope configs have them, two decimals each."""
    step = (last - first) / max(1, count - 1)
    return tuple(round(first + step * i, 2) for i in range(count))


CASE = YarnCase

_ASK: dict[str, Any] = {
    "dtype": "bfloat16",
    "seed": 1,
    "values": "normal",
    "batch": 1,
    "q_len": 2,
    "kv_len": 3,
    "offsets": (5000,),
    "key_offsets": (4000,),
    "composed": True,
}
_LAGUNA: dict[str, Any] = {
    **_ASK, "heads": 6, "kv_heads": 1, "head_dim": 128, "partial": 0.5, "base": 500000.0,
    "yarn": True, "nested": True, "beta_fast": 64.0, "beta_slow": 1.0,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_ASK, "heads": 2, "kv_heads": 1, "head_dim": 192, "nope": 128, "interleaved": True,
    "base": 10000.0, "max_positions": 163840, "yarn": True, "factor": 40.0, "original_max": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "old_names": True, "type_key": "type",
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    **_ASK, "kv_heads": 2, "head_dim": 64, "base": 150000.0, "max_positions": 131072, "yarn": True,
    "factor": 32.0, "original_max": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "old_names": True,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_ASK, "heads": 4, "kv_heads": 1, "head_dim": 128, "base": 1000000.0, "yarn": True,
    "factor": 4.0, "original_max": 32768, "max_positions": 32768, "old_names": True,
    "offsets": (70000,),
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    **_ASK, "heads": 4, "kv_heads": 1, "head_dim": 128, "base": 500000.0, "llama3": True,
    "original_max": 8192, "low_freq_factor": 1.0, "max_positions": 131072, "old_names": True,
}  # fmt: skip
_MINISTRAL: dict[str, Any] = {
    **_ASK, "heads": 4, "kv_heads": 1, "head_dim": 128, "base": 1000000.0, "yarn": True,
    "factor": 16.0, "original_max": 16384, "max_positions": 262144, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "temperature": 0.1,
    "type_key": "both", "offsets": (40000,),
}  # fmt: skip
_PHI: dict[str, Any] = {
    **_ASK, "heads": 2, "kv_heads": 1, "head_dim": 96, "base": 10000.0, "longrope": True,
    "original_max": 4096, "max_positions": 131072, "original_at_top": True, "old_names": True,
    "type_key": "type", "short_factor": divisors(1.05, 2.95, 48),
    "long_factor": divisors(1.03, 64.8, 48),
}  # fmt: skip

_PUBLISHED: tuple[tuple[str, YarnCase], ...] = (
    ("laguna-s-factor-128", YarnCase(**_LAGUNA, factor=128.0, original_max=8192,
        max_positions=1048576, attention_factor=1.4852030263919618)),
    ("laguna-xs-factor-32", YarnCase(**_LAGUNA, factor=32.0, original_max=4096,
        max_positions=131072, attention_factor=1.3465735902799727)),
    ("laguna-attention-factor-1.1", YarnCase(**_LAGUNA, factor=32.0, original_max=4096,
        max_positions=131072, attention_factor=1.1)),
    ("laguna-attention-factor-1", YarnCase(**_LAGUNA, factor=64.0, original_max=4096,
        max_positions=262144, attention_factor=1.0)),
    ("yarn-attention-factor-1", YarnCase(**{**_QWEN, "factor": 64.0, "attention_factor": 1.0,
        "original_max": 4096, "max_positions": 262144, "old_names": False})),
    ("deepseek-v2", YarnCase(**_DEEPSEEK, mscale=0.707, mscale_all_dim=0.707)),
    ("deepseek-v2-lite", YarnCase(**{**_DEEPSEEK, "heads": 3}, mscale=0.707,
        mscale_all_dim=0.707)),
    ("deepseek-v3", YarnCase(**_DEEPSEEK, mscale=1.0, mscale_all_dim=1.0)),
    ("deepseek-r1-decode", YarnCase(**{**_DEEPSEEK, "q_len": 1, "batch": 3,
        "offsets": (5000, 17, 130000), "key_offsets": (4000, 0, 4)}, mscale=1.0,
        mscale_all_dim=1.0)),
    ("gpt-oss-20b", YarnCase(**_GPT_OSS, heads=16)),
    ("gpt-oss-120b-new-names", YarnCase(**{**_GPT_OSS, "old_names": False}, heads=16)),
    ("qwen-2.5-7b-yarn", YarnCase(**{**_QWEN, "type_key": "type"})),
    ("qwen-3-8b-yarn", YarnCase(**{**_QWEN, "max_positions": 40960})),
    ("qwen-3-nested-nulls", YarnCase(**{**_QWEN, "old_names": False, "nested": True,
        "nulls": True})),
    ("llama-3.1-8b", YarnCase(**_LLAMA, factor=8.0, high_freq_factor=4.0)),
    ("llama-3.2-1b", YarnCase(**{**_LLAMA, "head_dim": 64}, factor=32.0, high_freq_factor=4.0)),
    ("llama-4-scout", YarnCase(**{**_LLAMA, "interleaved": True, "max_positions": 10485760},
        factor=16.0, high_freq_factor=1.5)),
    ("phi-3-mini-128k-long", YarnCase(**_PHI)),
    ("phi-3-mini-128k-short", YarnCase(**{**_PHI, "offsets": (4094,)})),
    ("phi-4-mini-partial", YarnCase(**{**_PHI, "head_dim": 128, "partial": 0.75})),
    ("ministral-3-8b", YarnCase(**_MINISTRAL)),
    ("ministral-3-per-request", YarnCase(**{**_MINISTRAL, "batch": 3,
        "offsets": (16383, 16384, 260000), "key_offsets": (0, 16380, 259999)})),
    ("position-a-million", YarnCase(**{**_LLAMA, "llama3": False, "original_max": None,
        "low_freq_factor": None, "offsets": (999_998,), "key_offsets": (0,)})),
)  # fmt: skip
_TABLES = (
    "laguna-s-factor-128",
    "deepseek-v3",
    "gpt-oss-20b",
    "llama-3.1-8b",
    "phi-4-mini-partial",
)
PINNED = _PUBLISHED + tuple(
    (f"{name}-frequencies", replace(case, frequencies=True))
    for name, case in _PUBLISHED
    if name in _TABLES
)
"""Rope configs of published models, by the name of the model; shapes cut to few heads. Some are
asked for their frequencies too, which not every engine shows."""
