"""The call of a person's own batched matrix product."""

from typing import Any

from cases.bmm import BmmCase
from harness.signatures import Parameter
from harness.subject import Tensors

PARAMETERS = {
    "a": Parameter(meaning="[batch, m, k]", needed=True),
    "b": Parameter(meaning="[batch, k, n]", needed=True),
    "alpha": Parameter(meaning="factor of the product; else 1 is meant", features=("alpha",)),
    "c": Parameter(
        meaning="added to the product: [batch, m, n], a row [n], or None", features=("addend",)
    ),
    "beta": Parameter(meaning="factor of c; else 1 is meant", features=("beta",)),
    "wide": Parameter(
        meaning="bool: return the sums as float32 (bfloat16 and float16 only)", features=("wide",)
    ),
}
OUTPUTS = ("out",)
FREE = ("a_layout", "b_layout")
RETURNS = "out [batch, m, n], of the dtype of a; float32 if `wide`, int32 of int8"


def arguments(case: BmmCase, t: Tensors) -> dict[str, Any]:
    return {
        "a": t["a"],
        "b": t["b"],
        "alpha": case.alpha,
        "c": t.get("c"),
        "beta": case.beta,
        "wide": case.wide,
    }


def claimed(features: frozenset[str]) -> frozenset[str]:
    """beta is the factor of an addend."""
    return features - {"beta"} if "addend" not in features else features


def refusal(case: BmmCase, names: frozenset[str], claims: frozenset[str]) -> str | None:
    del case, names, claims
    return None
