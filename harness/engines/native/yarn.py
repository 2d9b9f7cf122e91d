"""The native rope: a config.json read and applied with plain torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cases.yarn import DTYPES, FEATURES, YarnCase
from harness.engines.native.torch.yarn import Rotary, read
from harness.programs.yarn import NATIVE, program
from harness.subject import Subject, Tensors
from references.yarn import probe_columns


def run(
    case: YarnCase,
    tensors: Tensors,
    reads: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
) -> Tensors:
    """reads: what a reader of configs makes of them first; nothing, unless a fault is planted."""
    rotary = Rotary(read(reads(case.config()), case.layer_type))
    q, k = rotary(tensors["q"], tensors["k"], tensors["q_positions"], tensors["k_positions"])
    out = {"logits": _logits(rotary, q, k)}
    if case.frequencies:
        table = rotary.table(list(case.lengths)).float().to(q.device)
        out["inv_freq"] = torch.nn.functional.pad(table, (0, case.head_dim // 2 - table.shape[-1]))
    if case.composed:
        out["scale"] = _scale(rotary, case, q.device)
    return out | ({"q": q, "k": k} if case.rotated else {})


def _logits(rotary: Rotary, q: Tensor, k: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q.float() @ k.float().mT) * rotary.rope.softmax_scale


def _scale(rotary: Rotary, case: YarnCase, device: torch.device) -> Tensor:
    """The composed scale, measured: logits of unit vectors at position 0, in float32."""
    probe = torch.zeros(1, 1, 2, case.head_dim, device=device)
    for token, column in enumerate(probe_columns(case.rope)):
        probe[0, 0, token, column] = 1.0
    at = torch.zeros(1, 2, dtype=torch.int64, device=device)
    return _logits(rotary, *rotary(probe, probe, at, at))[0, 0].diagonal().contiguous()


SUBJECTS = (
    Subject(
        name="native.yarn.torch",
        run=run,
        claims=frozenset(FEATURES),
        dtypes=DTYPES,
        lanes=("cpu", "cuda"),
        programs={"cpu": program(NATIVE)},
    ),
)
