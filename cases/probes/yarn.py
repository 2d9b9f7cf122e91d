"""Probes of rotary embeddings: by which angle each pair turns, at which position that would be, and
how large the logits come out.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cases.case import Inputs
from cases.yarn import PINNED, POSITION_PROBE, YarnCase, probed_pairs

FILLS = (POSITION_PROBE,)

HEADS = 16
_CONFIGS = ("qwen-3-8b-yarn", "llama-3.1-8b", "deepseek-v3", "phi-4-mini-partial")
_PLAIN = YarnCase(
    dtype="float32", seed=8, values=POSITION_PROBE, batch=2, q_len=2, kv_len=2, heads=HEADS,
    kv_heads=1, head_dim=16, base=10000.0, max_positions=4096, offsets=(300, 5),
    key_offsets=(0, 3),
)  # fmt: skip


def first(claims: frozenset[str], dtypes: tuple[str, ...]) -> tuple[YarnCase, ...]:
    """Plain rope, and configs of four published models with sixteen heads."""
    always: frozenset[str] = getattr(claims, "always", frozenset())
    pinned, shown = dict(PINNED), {"values": POSITION_PROBE, "heads": HEADS, "seed": 8}
    fields: list[dict[str, Any]] = [{**shown, "dtype": d} for d in dtypes]
    found = [
        replace(case, **fields[i % len(dtypes)])
        for i, case in enumerate((_PLAIN, *(pinned[name] for name in _CONFIGS)))
    ]
    return tuple(case for case in found if all(getattr(case, name) for name in always))


def fits(case: YarnCase) -> bool:
    """Two heads for a pair."""
    return case.heads >= 2


def read(case: YarnCase, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> str | None:
    """Of the query, key and pair whose logits are most wrong: the angle, and the magnitude."""
    if case.values != POSITION_PROBE or "logits" not in observed:
        return None
    got, right = observed["logits"].double(), case.expected(inputs)["logits"]
    even = case.heads - case.heads % 2
    got, right = (x[:, :even].unflatten(1, (-1, 2)) for x in (got, right))
    apart = (got - right).square().sum(2)  # [request, pair, query, key]
    if not bool(apart.any()) or not bool(got.isfinite().all()):
        return None
    where = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    request, shown, query, key = where
    pair = probed_pairs(case)[2 * shown]
    at = (
        f"request {request}, query at position {int(inputs['q_positions'][request, query])}, "
        f"key at {int(inputs['k_positions'][request, key])}, pair {pair}"
    )
    turned, size = _polar(got[request, :, :, query, key])
    wanted, length = _polar(right[request, :, :, query, key])
    off = _wrapped(turned - wanted)
    grown = float(size[shown] / length[shown])
    if abs(float(off[shown])) < abs(grown - 1):
        return f"{at}: logits are {grown:.5g} x what they should be, and turned rightly"
    said = f"{at}: turned by {float(turned[shown]):.4g} rad, expected {float(wanted[shown]):.4g}"
    frequencies = case.table(inputs)[request, list(probed_pairs(case)[:even:2])]
    if (step := _shift(off, frequencies)) is not None:
        said += f": as if {abs(step)} position{'s' * (abs(step) > 1)} " + (
            "further apart" if step > 0 else "closer"
        )
    return said


def _polar(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(angle, size) of logits [pairs, 2]: the second is minus the sine."""
    return torch.atan2(-pairs[:, 1], pairs[:, 0]), pairs.square().sum(-1).sqrt()


def _wrapped(angle: torch.Tensor) -> torch.Tensor:
    """The same angle in [-pi, pi)."""
    return (angle + math.pi).remainder(2 * math.pi) - math.pi


def _shift(off: torch.Tensor, frequencies: torch.Tensor) -> int | None:
    """The whole number of positions, up to 8, that explains the angles of all pairs, or None."""
    nothing = float(off.square().sum())
    found = {
        step: float(_wrapped(off - step * frequencies).square().sum())
        for step in range(-8, 9)
        if step
    }
    best = min(found, key=lambda step: found[step])
    return best if found[best] < 0.01 * nothing else None
