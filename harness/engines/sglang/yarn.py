"""sglang's ropes: `get_rope` itself, and as its models build it, Laguna's translation included."""

from collections.abc import Callable

from cases.yarn import DTYPES, FEATURES, PINNED, TYPES, Claims, YarnCase
from harness.engines.sglang import deferred
from harness.programs.yarn import MLX, TRANSFORMERS, program
from harness.subject import Subject

MOST = 2**25
"""Numbers that a table of cos and sin may hold: it is built whole, so longer ones cost seconds."""
PUBLISHED = frozenset(case for _, case in PINNED)
"""Configs that are asked although their tables are twice as long."""


def _table(case: YarnCase) -> int:
    """Numbers in the tables: one row per position of the context, built with the module."""
    rope = case.rope
    rows = max(case.max_positions, case.far + 1)
    if case.yarn:
        rows = max(int(rope.original_max * rope.factor), case.far + 1)
    elif case.linear or case.dynamic:
        rows = max(int(case.max_positions * rope.factor), case.far + 1)
    elif case.longrope:
        rows = 2 * (case.max_positions + int(rope.original_max))
    return rows * rope.rotary_dim


def _refusal(case: YarnCase) -> str | None:
    most = 2 * MOST if case in PUBLISHED else MOST
    if (size := _table(case)) > most:
        return f"a table of {size / 1e6:.0f} million numbers, expected at most {most / 1e6:.0f}"
    if case.longrope and case.interleaved:
        return "Phi3LongRoPEScaledRotaryEmbedding rotates halves, and says so"
    if (case.longrope or case.dynamic or case.linear) and case.far >= case.max_positions:
        return "a position beyond the context, for which these types have no table"
    return None


def _subject(
    name: str,
    claims: Claims,
    refusal: Callable[[YarnCase], str | None] = lambda case: None,
    table: bool = True,
) -> Subject:
    """table: the rope keeps one of all positions, which `_refusal` bounds."""
    return Subject(
        name=f"sglang.yarn.{name}",
        run=deferred("ropes", "answer", name),
        claims=claims,
        dtypes=DTYPES,
        lanes=("cpu",),
        programs={"cpu": program(TRANSFORMERS)},
        refusal=lambda case: (
            claims.lacking(case) or refusal(case) or (_refusal(case) if table else None)
        ),
    )


def _latent(case: YarnCase) -> str | None:
    return "a lone mscale counts, as in DeepSeek's own code" if case.lone_mscale else None


def _ministral(case: YarnCase) -> str | None:
    if case.old_names and case.rope_type == "default":
        return "Ministral3Config without a rope dict has a YaRN of its own"
    return None


def _of_mlx_lm(case: YarnCase) -> str | None:
    return "a lone mscale counts in mlx_lm's YarnRoPE" if case.lone_mscale else None


_ALL = frozenset(FEATURES) - {"temperature", "frequencies", "nulls"}
"""A null is a value to sglang and to mlx_lm, and raises."""
_PLAIN = _ALL - {"nope", "nested", "proportional", "interleaved", "partial"}
_FIXED = _PLAIN - {
    "dynamic", "longrope", "short_factor", "long_factor", "attention_factor", "truncate",
    "original_at_top",
}  # fmt: skip
"""What mlx_lm's rope modules are built for as the config says: see its entries in known.toml."""
_GATED = Claims(_FIXED | {"dynamic"}, always=("old_names",))
SUBJECTS = (
    _subject("direct", Claims(_ALL - {"nope", "nested", "original_at_top"})),
    _subject("llama", Claims(_PLAIN)),
    _subject(
        "laguna",
        Claims(
            (_FIXED | {"partial", "attention_factor", "truncate"}) - {"old_names"},
            always=("nested",),
        ),
    ),
    _subject(
        "deepseek_v3",
        Claims(
            (_PLAIN | {"interleaved"})
            - (set(TYPES) - {"yarn"})
            - {"rotated", "original_at_top", "attention_factor"},  # the last is not read: see llama
            always=("nope",),
        ),
        _latent,
    ),
    _subject(
        "ministral3",
        Claims((_PLAIN | {"temperature", "nulls"}) - {"original_at_top"}),
        _ministral,
        table=False,
    ),
    Subject(
        name="sglang.yarn.mlx_decode",
        run=deferred("aot", "decode"),
        claims=_GATED,
        dtypes=DTYPES,
        runtime="mlx",
        lanes=("mps",),
        programs={"cpu": program(MLX)},
        refusal=lambda case: _GATED.lacking(case) or _of_mlx_lm(case),
        kernels=("mlx:{device}",),
    ),
)
