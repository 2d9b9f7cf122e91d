"""Probes of attention: which keys a row sees, whose they are, the sink's weight, and the scores."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from cases.case import Inputs
from cases.probes import weights
from cases.ranges import ranges
from cases.sdpa import PROBES, SdpaCase

FILLS = PROBES

_SMALL: dict[str, Any] = {
    "seed": 8, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "q_len": 5, "kv_len": 9,
}  # fmt: skip
_MASKS: tuple[dict[str, Any], ...] = (
    {"q_len": 1},
    {"causal": True},
    {"causal": True, "q_len": 9},
    {"causal": True, "window": 3},
    {"causal": True, "window": 3, "q_len": 1},
    {"causal": True, "kv_lens": (9, 6)},
    {"causal": True, "kv_lens": (5, 9), "q_lens": (2, 5), "side": "left"},
    {"causal": True, "schedule": (3, 1, 1)},
    {"causal": True, "window": 2, "schedule": (3, 1, 1)},
    *({"q_len": 1, "kv_len": n, "sinks": sink} for n, sink in ((1, -4.0), (2, 0.0), (4, 4.0))),
)
_SCORES: tuple[dict[str, Any], ...] = (
    {"q_len": 1},
    {"causal": True, "scale": 0.3},
    {"causal": True, "scale": 1.0, "softcap": 2.0},
    {"causal": True, "alibi": 8.0, "heads": 6, "lse": True},
    {"causal": True, "alibi": 8.0, "heads": 6},
)


def first(claims: frozenset[str], dtypes: tuple[str, ...]) -> tuple[SdpaCase, ...]:
    """Each mask that can be asked for, sinks beside 1 to 4 keys, and ladders of scores."""
    del claims
    asked = [("mask_probe", fields) for fields in _MASKS]
    asked += [("key_probe", fields) for fields in _SCORES]
    return tuple(
        SdpaCase(**{**_SMALL, **fields, "values": fill, "dtype": dtypes[i % len(dtypes)]})
        for i, (fill, fields) in enumerate(asked)
    )


def fits(case: SdpaCase) -> bool:
    """A column for every key."""
    return case.kv_len <= case.head_dim


def read(case: SdpaCase, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> str | None:
    """Of the first row that sees other keys than it should, else of the row that is most wrong."""
    if case.values not in FILLS:
        return None
    if "out" not in observed:
        return _lse(case, inputs, observed)
    got, right = observed["out"].double(), case.expected(inputs)["out"]
    rows = case.judged(inputs).get("out", torch.ones(()).bool().expand_as(got))[..., 0]
    for where in map(tuple, rows.nonzero().tolist()):
        if said := _other_keys(case, where, got[where], right[where]):
            return said
    apart = (got - right).abs().amax(-1).masked_fill(~rows, 0.0)
    where = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    return _other_weights(case, inputs, where, got[where], right[where])


def _at(where: tuple[int, ...]) -> str:
    return "request {}, head {}, query row {}".format(*where)


def _other_keys(
    case: SdpaCase, where: tuple[int, ...], got: torch.Tensor, right: torch.Tensor
) -> str | None:
    at = _at(where)
    if not bool(got.isfinite().all()):
        return f"{at} is not finite"
    if float(got.abs().max()) > 2 * case.batch * case.kv_heads:
        return f"{at} reads poison: padding, or a gap of the layout"
    seen, expected = weights.seen(got), (right > 0).nonzero().flatten().tolist()
    if case.alibi is not None:  # far keys weigh less than what is taken for none
        expected = weights.seen(right)
    if seen == expected:
        return None
    if beyond := [column for column in seen if column >= case.kv_len]:
        return f"{at} has weight in columns {ranges(beyond)}, where no value has any"
    said = f"{at} sees keys {ranges(seen)}, expected {ranges(expected)}"
    if len(expected) == case.window and abs(more := len(seen) - len(expected)) == 1:
        said += f": W{more:+d} keys visible"
    return said


def _other_weights(
    case: SdpaCase,
    inputs: Inputs,
    where: tuple[int, ...],
    got: torch.Tensor,
    right: torch.Tensor,
) -> str | None:
    """The right keys with other weights: of another head or request, another sink, other scores."""
    at, keys = _at(where), (right > 0).nonzero().flatten().tolist()
    request, head, _ = where
    if not keys:
        return None
    if said := weights.scores(got, right, keys) if case.values == "key_probe" else None:
        return f"{at}: {said}"
    own = 1 + request * case.kv_heads + head // (case.heads // case.kv_heads)
    share = float(got.sum() / right.sum())
    owner, unit = round(own * share), torch.finfo(getattr(torch, case.dtype)).eps
    others = divmod(owner - 1, case.kv_heads)
    if owner not in (0, own) and abs(own * share - owner) < 4 * unit * own:
        return (
            f"{at} reads values of request {others[0]}, kv head {others[1]}, expected request "
            f"{request}, kv head {(own - 1) % case.kv_heads}"
        )
    if case.alibi is not None:
        return f"{at}: {weights.scores(got, right, keys)}"
    if case.sinks is not None and case.values == "mask_probe":
        mass, logit = float(got.sum()) / own, float(inputs["sinks"][head])
        weighs = len(keys) * (1 / mass - 1) if mass else math.inf
        return f"{at}: the sink weighs {weighs:.4g} keys, expected {math.exp(logit):.4g}"
    return f"{at}: the weights add up to {share:.5g} of what they should"


def _lse(case: SdpaCase, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> str | None:
    """The log-sum-exp as a number of keys, where scores are 0."""
    if "lse" not in observed or case.values != "mask_probe" or case.alibi is not None:
        return None
    got, right = observed["lse"].double(), case.expected(inputs)["lse"]
    apart = (got - right).abs().nan_to_num(nan=0.0)
    where = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    return (
        f"{_at(where)}: lse counts {float(got[where].exp()):.5g} keys, "
        f"expected {float(right[where].exp()):.5g}"
    )
