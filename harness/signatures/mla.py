"""The call of a person's own latent attention: write the new rows, attend, project."""

import copy
from typing import Any

from cases.mla import MlaCase
from harness.signatures import Parameter
from harness.subject import Tensors

PARAMETERS = {
    "q_nope": Parameter(meaning="[tokens, heads, nope], packed request by request", needed=True),
    "q_pe": Parameter(meaning="[tokens, heads, rope], rotated", needed=True),
    "latent": Parameter(meaning="the new tokens' rows [tokens, latent]", needed=True),
    "k_pe": Parameter(meaning="their rotated part [tokens, rope]", needed=True),
    "w_uk": Parameter(meaning="[heads, nope, latent]", needed=True),
    "w_uv": Parameter(meaning="[heads, latent, v]", needed=True),
    "cache": Parameter(
        meaning="[pages, page_size, latent + rope] before the call, without pages [batch, kv_len, "
        "latent + rope]; a copy, to be written into",
        needed=True,
    ),
    "slots": Parameter(
        meaning="int64 [tokens]: where each new row goes, in rows of the cache; negative: nowhere",
        needed=True,
    ),
    "table": Parameter(
        meaning="int32 [batch, n]: the pages of each request in order", features=("page_size",)
    ),
    "q_lens": Parameter(
        meaning="new tokens of each request, a list; else one each is meant",
        features=("q_len", "q_lens"),
    ),
    "kv_lens": Parameter(
        meaning="keys of each request, new ones included, a list", features=("kv_lens",)
    ),
    "scale": Parameter(
        meaning="softmax scale; else 1/sqrt(nope + rope) is meant", features=("mscale",)
    ),
    "splits": Parameter(
        meaning="parts into which the keys are cut, attended apart and merged",
        features=("splits",),
    ),
    "lse": Parameter(
        meaning="bool: return (out, lse), lse float32 [tokens, heads]", features=("lse",)
    ),
    "stages": Parameter(
        meaning="bool: return a dict with q_latent, o_latent [tokens, heads, latent] and the "
        "written cache too",
        features=("stages",),
    ),
}
OUTPUTS = ("out", "lse", "q_latent", "o_latent", "cache")
FREE = ("layout", "padding", "poison", "lse")
RETURNS = "out [tokens, heads, v], of the dtype of q_nope; or (out, lse), or a dict"


def arguments(case: MlaCase, t: Tensors) -> dict[str, Any]:
    q_lens, kv_lens = case.lengths()
    names = ("q_nope", "q_pe", "latent", "k_pe", "w_uk", "w_uv", "slots", "table")
    return {
        **{name: t[name] for name in names},
        "cache": copy.deepcopy(t["cache"]),
        "q_lens": list(q_lens),
        "kv_lens": list(kv_lens),
        "scale": case.softmax_scale,
        "splits": case.splits,
        "lse": case.lse,
        "stages": case.stages,
    }


def claimed(features: frozenset[str]) -> frozenset[str]:
    return features


def refusal(case: MlaCase, names: frozenset[str], claims: frozenset[str]) -> str | None:
    del case, names, claims
    return None
