"""The call of a person's own mask function. A cache with its mask needs an engine's adapter."""

from typing import Any

from cases.banded_mask import BandedMaskCase
from harness.signatures import Parameter
from harness.subject import Tensors

PARAMETERS = {
    "n": Parameter(meaning="new tokens: the mask's rows", needed=True),
    "offset": Parameter(
        meaning="tokens in the cache before them; else 0 is meant", features=("offset",)
    ),
    "window": Parameter(
        meaning="slots that each query sees at most, its own included, or None",
        features=("window",),
    ),
    "left_padding": Parameter(
        meaning="per request, slots at the left end that hold no token, or None",
        features=("left_padding",),
    ),
    "right_padding": Parameter(
        meaning="per request, slots at the right end that hold no token, or None",
        features=("right_padding",),
    ),
    "chunk": Parameter(
        meaning="each query sees only its own chunk of so many slots; or None",
        features=("chunk",),
    ),
    "device": Parameter(meaning="where the mask is to be made"),
}
OUTPUTS = ("visible",)
FREE = ()
RETURNS = "bool [n, offset + n], True where seen; with a padding [batch, n, offset + n]"


def arguments(case: BandedMaskCase, t: Tensors) -> dict[str, Any]:
    return {
        "n": case.n,
        "offset": case.offset,
        "window": case.window,
        "left_padding": case.left_padding,
        "right_padding": case.right_padding,
        "chunk": case.chunk,
        "device": getattr(t["tokens"], "device", None),
    }


def claimed(features: frozenset[str]) -> frozenset[str]:
    return features


def refusal(case: BandedMaskCase, names: frozenset[str], claims: frozenset[str]) -> str | None:
    del case, names, claims
    return None
