"""The call of a person's own scaled dot-product attention."""

from typing import Any

from cases.sdpa import SdpaCase
from harness.signatures import Parameter
from harness.subject import Tensors

PARAMETERS = {
    "q": Parameter(meaning="queries [batch, heads, q_len, head_dim]", needed=True),
    "k": Parameter(meaning="keys [batch, kv_heads, kv_len, head_dim]", needed=True),
    "v": Parameter(meaning="values, shaped as the keys", needed=True),
    "scale": Parameter(meaning="softmax scale; else 1/sqrt(head_dim)", features=("scale",)),
    "causal": Parameter(
        meaning="bool: the last query aligned with the last key", features=("causal",)
    ),
    "window": Parameter(
        meaning="keys that each query sees at most, its own included, or None",
        features=("window",),
    ),
    "softcap": Parameter(
        meaning="scores pass through softcap * tanh(score / softcap), or None",
        features=("softcap",),
    ),
    "sinks": Parameter(
        meaning="one more logit per head [heads] with value 0, or None", features=("sinks",)
    ),
    "alibi": Parameter(
        meaning="ALiBi slopes float32 [heads]: minus slope * distance joins the score, or None",
        features=("alibi",),
    ),
    "distance": Parameter(
        meaning="int32 [batch, 1, q_len, kv_len]: position of the query minus the key's, or None"
    ),
    "q_lens": Parameter(meaning="valid queries per request, or None", features=("q_lens",)),
    "kv_lens": Parameter(meaning="valid keys per request, or None", features=("kv_lens",)),
    "side": Parameter(meaning='where padding stands: "right" or "left"', features=("side",)),
    "visible": Parameter(
        meaning="bool [batch, 1, q_len, kv_len]: the mask, in place of all that says what is seen",
        features=("causal", "window", "q_lens", "kv_lens", "side"),
    ),
    "lse": Parameter(
        meaning="bool: return (out, lse), lse float32 [batch, heads, q_len]", features=("lse",)
    ),
}
OUTPUTS = ("out", "lse")
FREE = ("layout", "lse", "causal")
RETURNS = "out, shaped as q, of its dtype; or (out, lse)"


def arguments(case: SdpaCase, t: Tensors) -> dict[str, Any]:
    return {
        "q": t["q"],
        "k": t["k"],
        "v": t["v"],
        "scale": case.softmax_scale,
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": t.get("sinks"),
        "alibi": t.get("alibi"),
        "distance": t.get("distance"),
        "q_lens": case.q_lens,
        "kv_lens": case.kv_lens,
        "side": case.side,
        "visible": t["visible"],
        "lse": case.lse,
    }


def claimed(features: frozenset[str]) -> frozenset[str]:
    """A window looks back, so it needs causal."""
    return features | {"causal"} if "window" in features else features


def refusal(case: SdpaCase, names: frozenset[str], claims: frozenset[str]) -> str | None:
    """A function that is causal and has no say in it is causal in every call."""
    if "causal" not in claims or names & {"causal", "visible"} or case.causal or case.q_len == 1:
        return None
    return "the function is always causal: it has no parameter `causal`"
