"""Wrong versions of scaled dot-product attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cases.case import Inputs
from cases.defects import Defect, Question
from cases.sdpa import SdpaCase
from references.sdpa import visible_keys


def _window(change: int) -> Callable[[SdpaCase, Inputs], Question | None]:
    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        if case.window is None:
            return None
        width = case.window + change
        if width < 1:  # a window of no keys: every row is dead
            return case, {**inputs, "visible": torch.zeros_like(inputs["visible"])}
        return _visible(replace(case, window=width), inputs)

    return ask


def _visible(case: SdpaCase, inputs: Inputs) -> Question:
    return case, {**inputs, "visible": case._visible()[:, None]}


def _no_window_in_decode(case: SdpaCase, inputs: Inputs) -> Question | None:
    if case.window is None:
        return None
    visible = inputs["visible"].clone()
    open_ = replace(case, window=None)._visible()[:, None]
    for start, end, _ in case.steps():
        if end - start == 1:
            visible[:, :, start:end] = open_[:, :, start:end]
    return case, {**inputs, "visible": visible}


def _last_key(case: SdpaCase, inputs: Inputs) -> Question:
    """The newest key that each request has is not seen by anybody."""
    visible = inputs["visible"].clone()
    newest = visible.any(-2, keepdim=True).float() * torch.arange(1, case.kv_len + 1)
    gone = newest == newest.amax(-1, keepdim=True)
    return case, {**inputs, "visible": visible & ~gone}


def _first_key(case: SdpaCase, inputs: Inputs) -> Question:
    """The oldest key that each row sees is skipped."""
    visible = inputs["visible"]
    oldest = visible & (visible.cumsum(-1) == 1)
    return case, {**inputs, "visible": visible & ~oldest}


def _upper_left(case: SdpaCase, inputs: Inputs) -> Question | None:
    if not case.causal or case.kv_lens or case.q_lens or case.kv_len == case.q_len:
        return None
    row, key = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)[None]
    mask = key <= row
    if case.window is not None:
        mask &= key > row - case.window
    return case, {**inputs, "visible": mask.expand_as(inputs["visible"])}


def _not_causal(case: SdpaCase, inputs: Inputs) -> Question | None:
    if not case.causal:
        return None
    return _visible(replace(case, causal=False, window=None, schedule=()), inputs)


def _one_ahead(case: SdpaCase, inputs: Inputs) -> Question | None:
    """Every row sees one key of the future."""
    if not case.causal:
        return None
    q_lens, kv_lens = case._lens()
    free = visible_keys(
        q_lens, kv_lens, case.q_len, case.kv_len, causal=False, window=None, side=case.side
    )
    visible = inputs["visible"].clone()
    visible[..., 1:] |= inputs["visible"][..., :-1]
    return case, {**inputs, "visible": visible & free[:, None]}


def _without(field: str) -> Callable[[SdpaCase, Inputs], Question | None]:
    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        if getattr(case, field) is None:
            return None
        off: dict[str, Any] = {field: None}
        return replace(case, **off), {k: v for k, v in inputs.items() if k != field}

    return ask


def _scaled(by: float) -> Callable[[SdpaCase, Inputs], Question | None]:
    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        return replace(case, scale=case.softmax_scale * by), inputs

    return ask


def _padding_seen(case: SdpaCase, inputs: Inputs) -> Question | None:
    """Padding keys are attended as zeros."""
    if case.kv_lens is None:
        return None
    full = replace(case, kv_lens=None)
    valid = visible_keys(
        (case.q_len,) * case.batch, case.kv_lens, case.q_len, case.kv_len,
        causal=False, window=None, side=case.side,
    )[:, :1].transpose(1, 2)[:, None]  # fmt: skip
    k, v = (torch.where(valid, inputs[n], torch.zeros_like(inputs[n])) for n in ("k", "v"))
    visible = inputs["visible"] | (~valid.transpose(-1, -2) & inputs["visible"].any(-1, True))
    return full, {**inputs, "k": k, "v": v, "visible": visible}


def _order(case: SdpaCase) -> torch.Tensor:
    """For every query head, the head whose key/value group a tiling kernel gives it."""
    return torch.arange(case.heads) % case.kv_heads


def _tiled(case: SdpaCase, inputs: Inputs) -> Question | None:
    if case.kv_heads in (1, case.heads):
        return None
    order = _order(case)
    wide = replace(case, kv_heads=case.heads)
    return wide, {**inputs, "k": inputs["k"][:, order], "v": inputs["v"][:, order]}


def _sink_scaled(case: SdpaCase, inputs: Inputs) -> Question | None:
    if case.sinks is None:
        return None
    return case, {**inputs, "sinks": inputs["sinks"].double() * case.softmax_scale}


DEFECTS = (
    Defect(
        name="window-plus-one",
        bugs=("B002", "B034"),
        sentence="window off by one: W+1 keys visible",
        question=_window(+1),
    ),
    Defect(
        name="window-minus-one",
        bugs=("B035",),
        sentence="window off by one: W-1 keys visible",
        question=_window(-1),
    ),
    Defect(
        name="window-ignored",
        bugs=("B032",),
        sentence="window ignored: every earlier key visible",
        question=lambda case, inputs: (
            None if case.window is None else _visible(replace(case, window=None), inputs)
        ),
    ),
    Defect(
        name="window-ignored-in-decode",
        bugs=("B005", "B006"),
        sentence="window ignored where a step has a single query",
        question=_no_window_in_decode,
    ),
    Defect(
        name="last-key-missing",
        bugs=(),
        sentence="last key missing",
        question=_last_key,
    ),
    Defect(
        name="first-key-missing",
        bugs=(),
        sentence="first visible key of every row missing",
        question=_first_key,
    ),
    Defect(
        name="upper-left",
        bugs=("B013", "B014", "B015"),
        sentence="causal mask aligned to the upper left instead of the lower right",
        question=_upper_left,
    ),
    Defect(
        name="causal-ignored",
        bugs=(),
        sentence="causal ignored: the future is visible",
        question=_not_causal,
    ),
    Defect(
        name="causal-plus-one",
        bugs=(),
        sentence="causal off by one: one key of the future visible",
        question=_one_ahead,
    ),
    Defect(
        name="sink-dropped",
        bugs=(),
        sentence="sinks dropped",
        question=_without("sinks"),
    ),
    Defect(
        name="sink-scaled",
        bugs=(),
        sentence="sink logits multiplied by the softmax scale",
        question=_sink_scaled,
    ),
    Defect(
        name="softcap-ignored",
        bugs=(),
        sentence="softcap ignored",
        question=_without("softcap"),
    ),
    Defect(
        name="heads-tiled",
        bugs=(),
        sentence="key/value heads tiled instead of repeated over the query heads",
        question=_tiled,
    ),
    Defect(
        name="padding-visible",
        bugs=("B021",),
        sentence="padding keys attended as zeros",
        question=_padding_seen,
    ),
    Defect(
        name="scale-plus-0.1%",
        bugs=(),
        sentence="scores scaled by 1.001 too much",
        question=_scaled(1.001),
    ),
    Defect(
        name="scale-ignored",
        bugs=(),
        sentence="scale ignored: 1/sqrt(head_dim) used instead",
        question=lambda case, inputs: (
            None if case.scale is None else (replace(case, scale=None), inputs)
        ),
    ),
)
"""The fault dictionary: each is planted by the tests and looked for in every residual."""
