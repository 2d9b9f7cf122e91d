"""Probes of latent attention: which keys, of which request and page, a token sees; its scores."""

from collections.abc import Mapping
from typing import Any

import torch

from cases.case import Inputs
from cases.mla import PROBES, MlaCase
from cases.probes import weights
from cases.ranges import ranges

FILLS = PROBES

_SMALL: dict[str, Any] = {
    "seed": 8, "batch": 2, "heads": 2, "kv_len": 7,
    "latent_dim": 16, "rope_dim": 8, "nope_dim": 8, "v_dim": 8,
}  # fmt: skip
_LONG: dict[str, Any] = {
    **_SMALL, "kv_len": 20, "latent_dim": 64, "rope_dim": 32, "nope_dim": 32, "v_dim": 32,
}  # fmt: skip
_PAGES: tuple[dict[str, Any], ...] = (
    _SMALL,
    {**_SMALL, "q_len": 3},
    {**_SMALL, "page_size": 1, "kv_lens": (7, 4)},
    {**_LONG, "page_size": 16, "kv_lens": (20, 17)},
    {**_SMALL, "q_len": 3, "q_lens": (3, 1), "kv_lens": (7, 5), "padding": 2, "page_size": 1},
    {**_SMALL, "splits": 4},
    {**_SMALL, "q_len": 4, "schedule": (2, 1, 1)},
    {**_SMALL, "stages": True},
)
_SCORES: tuple[dict[str, Any], ...] = (
    {**_SMALL, "mscale": 1.2608},
    {**_SMALL, "splits": 3, "kv_lens": (7, 5)},
    _SMALL,
)


def first(claims: frozenset[str], dtypes: tuple[str, ...]) -> tuple[MlaCase, ...]:
    """Plain, paged, ragged, split and stepwise reads, and ladders of scores."""
    del claims
    asked = [("page_probe", fields) for fields in _PAGES]
    asked += [("key_probe", fields) for fields in _SCORES]
    return tuple(
        MlaCase(**{**fields, "values": fill, "dtype": dtypes[i % len(dtypes)]})
        for i, (fill, fields) in enumerate(asked)
    )


def fits(case: MlaCase) -> bool:
    """A latent, a rotated and a v column for every key."""
    return case.kv_len <= min(case.latent_dim, case.rope_dim, case.v_dim)


def read(case: MlaCase, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> str | None:
    """Of the first token that sees other rows than it should, else of the most wrong one."""
    name = next((name for name in ("o_latent", "out") if name in observed), None)
    if case.values not in FILLS or name is None:
        return None
    plain = {k: x for k, x in inputs.items() if k not in ("q_latent", "o_latent")}
    got, right = observed[name].double()[: case.tokens], case.expected(plain)[name][: case.tokens]
    for where in map(tuple, torch.cartesian_prod(*map(torch.arange, got.shape[:2])).tolist()):
        if said := _other_rows(case, inputs, where, got[where], right[where]):
            return said
    apart = (got - right).abs().amax(-1)
    if not bool(apart.any()):
        return None
    where = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    keys = (right[where] > 0).nonzero().flatten().tolist()
    if case.values == "key_probe" and (said := weights.scores(got[where], right[where], keys)):
        return f"{_at(case, where)}: {said}"
    share = float(got[where].sum() / right[where].sum())
    return f"{_at(case, where)}: the weights add up to {share:.5g} of what they should"


def _at(case: MlaCase, where: tuple[int, ...]) -> str:
    token, head = where
    named = case.place("lse", (torch.tensor([token]), torch.tensor([head])))
    return f"request {int(named['request'])}, position {int(named['position'])}, head {head}"


def _other_rows(
    case: MlaCase,
    inputs: Inputs,
    where: tuple[int, ...],
    got: torch.Tensor,
    right: torch.Tensor,
) -> str | None:
    at = _at(case, where)
    if not bool(got.isfinite().all()):
        return f"{at} is not finite"
    if float(got.abs().max()) > 2 * 4**case.batch:
        return f"{at} reads poison: rows that are no request's, or not written yet"
    seen, expected = weights.seen(got), (right > 0).nonzero().flatten().tolist()
    owners = _owners(case, got, len(seen)) or _owners(case, got, len(expected))
    request = int(case.place("lse", tuple(torch.tensor([i]) for i in where))["request"])
    if seen == expected and owners in ({}, {request: expected}):
        return None
    found = " and ".join(f"{_reads(keys)} of request {b}" for b, keys in owners.items())
    said = f"{at} sees keys {found or ranges(seen)}, expected {ranges(expected)}"
    said += f" of request {request}" if case.batch > 1 else ""
    if case.page_size is not None:
        lost = [key for key in expected if key not in owners.get(request, seen)]
        pages = sorted({key // case.page_size for key in lost})
        homes = [int(inputs["table"][request, entry]) for entry in pages]
        said += f"; what it misses lies in page {ranges(sorted(homes))}" if homes else ""
    return said


def _reads(keys: list[int]) -> str:
    """Keys in order, some of them more than once."""
    once = sorted(set(keys))
    again = [key for key in once if keys.count(key) > 1]
    return ranges(once) + (f" ({ranges(again)} more than once)" if again else "")


def _owners(case: MlaCase, got: torch.Tensor, reads: int) -> dict[int, list[int]]:
    """The keys by the request whose rows they were read from, where `reads` rows weigh alike.

    The size of a row is 4**request, so that a sum of rows tells how often each was read. None where
    the sizes are no whole numbers.
    """
    if case.values != "page_probe":
        return {}
    sizes = got * reads
    if bool(((sizes - sizes.round()).abs() > 1 / 16).any()):
        return {}
    owners: dict[int, list[int]] = {}
    for key, size in enumerate(sizes.round().long().tolist()):
        for request in range(case.batch):
            owners.setdefault(request, []).extend([key] * (size // 4**request % 4))
    return {request: keys for request, keys in owners.items() if keys}
