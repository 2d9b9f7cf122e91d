"""Masks and caches of sglang's MLX server."""

from collections.abc import Callable

from cases.banded_mask import BandedMaskCase
from harness.engines.sglang import deferred
from harness.subject import Subject

KEYS = ("float32", "bfloat16", "float16")
SCHEDULE = frozenset({"offset", "window", "steps"})


def _written(case: BandedMaskCase) -> str | None:
    return "the server's caches can't be trimmed" if case.trims else None


def _windowed(case: BandedMaskCase) -> str | None:
    if case.reach is None:
        return "this cache belongs to a layer with a window"
    return _written(case)


def _subject(
    name: str,
    claims: frozenset[str],
    dtypes: tuple[str, ...],
    refusal: Callable[[BandedMaskCase], str | None] = _written,
) -> Subject:
    """name: of the call in `calls.masks` too."""
    return Subject(
        name=f"sglang.banded_mask.{name}",
        run=deferred("masks", name),
        runtime="mlx",
        claims=claims,
        dtypes=dtypes,
        lanes=("mps",),
        refusal=refusal,
        kernels=("mlx:{device}",),
    )


SUBJECTS = (
    _subject("make_attention_mask", SCHEDULE - {"steps"}, ("bool",)),
    _subject("offset_cache", SCHEDULE - {"steps"}, ("bool",)),
    _subject("contiguous", SCHEDULE, KEYS),
    _subject("windowed", SCHEDULE | {"size"}, KEYS, _windowed),
    _subject("pooled", SCHEDULE, KEYS),
)
