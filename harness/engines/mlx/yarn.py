"""mx.fast.rope, with a base of its own or with periods given."""

from collections.abc import Callable

import mlx.core as mx
import torch

from cases.yarn import DTYPES, OUTPUTS, Claims, YarnCase
from harness.programs.yarn import MLX, MLX_TABLE, YarnArithmetic, program
from harness.subject import Subject, Tensors
from references.yarn import per_request, probe_columns

Turn = Callable[[YarnCase, mx.array, int | mx.array], mx.array]
"""(case, x whose first columns are the rotary part, offset of each row) to x rotated."""


def _base(case: YarnCase, x: mx.array, offset: int | mx.array) -> mx.array:
    rope = case.rope
    return mx.fast.rope(
        x,
        rope.rotary_dim,
        traditional=rope.interleaved,
        base=rope.base,
        scale=1 / rope.factor if rope.kind == "linear" else 1.0,
        offset=offset,
    )


def _periods(case: YarnCase, x: mx.array, offset: int | mx.array) -> mx.array:
    rope = case.rope
    table = per_request(rope, case.lengths[:1])[0]
    if rope.attention_factor != 1:
        part = x[..., : rope.rotary_dim] * mx.array(rope.attention_factor, x.dtype)
        x = mx.concatenate([part, x[..., rope.rotary_dim :]], -1)
    return mx.fast.rope(
        x,
        rope.rotary_dim,
        traditional=rope.interleaved,
        base=None,
        scale=1.0,
        offset=offset,
        freqs=mx.array((1 / table).float().numpy()),
    )


def _run(turn: Turn) -> Callable[[YarnCase, Tensors], Tensors]:
    def rotated(case: YarnCase, x: mx.array, offsets: tuple[int, ...]) -> mx.array:
        offset = offsets[0] if len(set(offsets)) == 1 else mx.array(offsets)
        if not case.nope:
            return turn(case, x, offset)
        part = turn(case, x[..., case.nope :], offset)
        return mx.concatenate([x[..., : case.nope], part], -1)

    def run(case: YarnCase, tensors: Tensors) -> Tensors:
        q = rotated(case, tensors["q"], case.offsets)
        k = rotated(case, tensors["k"], case.key_offsets)
        out = {"logits": _logits(case, q, k)}
        if case.composed:
            probe = _probe(case)
            turned = rotated(case, probe[:, :, :1], (0,)), rotated(case, probe[:, :, 1:], (0,))
            out["scale"] = mx.stack([_logits(case, x, x)[0, 0, 0, 0] for x in turned])
        return out | ({"q": q, "k": k} if case.rotated else {})

    return run


def _logits(case: YarnCase, q: mx.array, k: mx.array) -> mx.array:
    k = mx.repeat(k.astype(mx.float32), q.shape[1] // k.shape[1], 1)
    return (q.astype(mx.float32) @ k.swapaxes(-1, -2)) * case.rope.softmax_scale


def _probe(case: YarnCase) -> mx.array:
    """Two unit vectors [1, 1, 2, head_dim] for the composed scale, in float32."""
    probe = torch.zeros(1, 1, 2, case.head_dim)
    for token, column in enumerate(probe_columns(case.rope)):
        probe[0, 0, token, column] = 1.0
    return mx.array(probe.numpy())


_SHAPE = {"interleaved", "partial", "nope", "factor", "original_max"}
_SPELLING = {"old_names", "type_key", "nested", "nulls", "original_at_top"}
_PARAMETERS = {
    "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
}  # fmt: skip
_ANSWERS = set(OUTPUTS) - {"frequencies"}


def _one_table(case: YarnCase) -> str | None:
    return "requests of one call need one table" if case.mixed_lengths else None


def _subject(
    name: str,
    turn: Turn,
    claims: Claims,
    spec: YarnArithmetic,
    refusal: Callable[[YarnCase], str | None] = lambda case: None,
) -> Subject:
    return Subject(
        name=f"mlx.yarn.{name}",
        run=_run(turn),
        claims=claims,
        dtypes=DTYPES,
        runtime="mlx",
        lanes=("mps",),
        programs={"cpu": program(spec)},
        refusal=refusal,
    )


SUBJECTS = (
    _subject("fast_rope", _base, Claims(_ANSWERS | _SHAPE | _SPELLING | {"linear"}), MLX),
    _subject(
        "fast_rope_freqs",
        _periods,
        Claims(
            _ANSWERS | _SHAPE | _SPELLING | _PARAMETERS
            | {"yarn", "llama3", "dynamic", "longrope", "proportional"}
        ),
        MLX_TABLE,
        _one_table,
    ),
)  # fmt: skip
