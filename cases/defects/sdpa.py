"""Wrong versions of scaled dot-product attention."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cases import values
from cases.case import Inputs
from cases.defects import Ask, Defect, Lasting, Question
from cases.defects._rounding import SHORT, nearest, truncated
from cases.sdpa import SdpaCase
from references.sdpa import visible_keys

BLOCK = 16
"""Keys in a block of the planted kernels that work by blocks."""


def _window(change: int) -> Ask:
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


def _without(field: str) -> Ask:
    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        if getattr(case, field) is None:
            return None
        off: dict[str, Any] = {field: None}
        return replace(case, **off), {k: v for k, v in inputs.items() if k != field}

    return ask


def _scaled(by: float) -> Ask:
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


def _padded_to_the_full(case: SdpaCase, inputs: Inputs) -> Question | None:
    """A batch's windows are padded on the right, and hidden from the columns that whole requests
    would be padded from: short ones lose their newest keys."""
    if case.window is None or case.kv_lens is None or case.q_lens is not None:
        return None
    keys = torch.tensor(case.kv_lens)[:, None] - case.q_len + 1 + torch.arange(case.q_len)
    moved = keys.amax(0) - keys.clamp(max=case.window).amax(0)
    rank = inputs["visible"].cumsum(-1)
    seen = rank <= (keys - moved)[:, None, :, None]
    return case, {**inputs, "visible": inputs["visible"] & seen}


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


# Masks ---------------------------------------------------------------------------------------


def _mask_added(case: SdpaCase, inputs: Inputs) -> Question | None:
    """A mask of bools is added to the scores: 1 for a visible key, 0 for a hidden one.

    Row i gets a column of its own, 1 / scale, which meets a 1 in the keys that it sees.
    """
    visible = inputs["visible"]
    if bool(visible.all()) or case.softcap is not None:
        return None
    wide = (case.batch, case.heads, case.q_len, case.q_len)
    row = (torch.eye(case.q_len).double() / case.softmax_scale).expand(wide)
    seen = visible.mT.double().expand(case.batch, case.kv_heads, case.kv_len, case.q_len)
    other = replace(case, head_dim=case.head_dim + case.q_len, scale=case.softmax_scale)
    return other, {
        **inputs,
        "q": torch.cat([inputs["q"].double(), row], -1),
        "k": torch.cat([inputs["k"].double(), seen], -1),
        "visible": torch.ones_like(visible),
    }


def _mask_over_heads(case: SdpaCase, inputs: Inputs) -> Question | None:
    """The mask's batch axis meets the axis of kv heads: as many requests as kv heads."""
    if case.batch == 1 or case.batch != case.kv_heads:
        return None
    group = case.heads // case.kv_heads
    visible = inputs["visible"][:, 0].repeat_interleave(group, 0).expand(case.batch, -1, -1, -1)
    wide = replace(case, kv_heads=case.heads)
    k, v = (inputs[name].repeat_interleave(group, 1) for name in ("k", "v"))
    return wide, {**inputs, "k": k, "v": v, "visible": visible}


def _mask_replaced(case: SdpaCase, inputs: Inputs) -> Question | None:
    """The caller's mask is overwritten by a causal one of the padded lengths."""
    if case.kv_lens is None and case.q_lens is None:
        return None
    return _visible(replace(case, kv_lens=None, q_lens=None), inputs)


def _mask_read_ragged(case: SdpaCase, inputs: Inputs) -> Question | None:
    """A padded mask is read as the rows of all requests one after another, without padding."""
    if case.kv_lens is None and case.q_lens is None:
        return None
    flat = inputs["visible"].flatten()
    visible = torch.zeros_like(inputs["visible"])
    start = 0
    for request, (rows, keys) in enumerate(zip(*case._lens(), strict=True)):
        part = flat[start : start + rows * keys].reshape(rows, keys)
        visible[request, 0, :rows, :keys] = part
        start += rows * keys
    return case, {**inputs, "visible": visible}


def _oldest_pad_bit(case: SdpaCase, inputs: Inputs) -> Question | None:
    """A padding mask over the keys is cut to the length of the new tokens, and multiplies them."""
    if case.kv_lens is None or case.side != "left" or case.q_len > 1:
        return None
    kept = (torch.tensor(case.kv_lens) == case.kv_len)[:, None, None, None]
    k, v = inputs["k"].clone(), inputs["v"].clone()
    for x in (k, v):
        x[:, :, -1:] *= kept
    return case, {**inputs, "q": inputs["q"] * kept, "k": k, "v": v}


def _past_the_end(case: SdpaCase, inputs: Inputs) -> Question | None:
    """The last rows run on to a whole block of keys; what stands beyond the end is zero."""
    beyond = -case.kv_len % BLOCK
    if beyond == 0 or case.kv_lens is not None:
        return None
    k, v = (torch.nn.functional.pad(inputs[n], (0, 0, 0, beyond)) for n in ("k", "v"))
    visible = torch.nn.functional.pad(inputs["visible"], (0, beyond))
    visible[..., -1:, case.kv_len :] = inputs["visible"][..., -1:, -1:]
    other = replace(case, kv_len=case.kv_len + beyond, schedule=())
    longer = {**inputs, "k": k, "v": v, "visible": visible}
    if case.alibi is not None:
        further = inputs["distance"][..., -1:] - torch.arange(1, beyond + 1).int()
        longer["distance"] = torch.cat([inputs["distance"], further], -1)
    return other, longer


def _tail_of_one(case: SdpaCase, inputs: Inputs) -> Question | None:
    """A last vector of a single key is left out."""
    if case.kv_len % 32 != 1 or case.kv_len == 1:
        return None
    visible = inputs["visible"].clone()
    visible[..., -1] = False
    return case, {**inputs, "visible": visible}


def _dead(inputs: Inputs) -> torch.Tensor:
    """bool [batch, 1, q_len, 1]: rows that see no key."""
    return ~inputs["visible"].any(-1, keepdim=True)


def _dead_rows_average(case: SdpaCase, inputs: Inputs) -> Question | None:
    """A finite mask value: where every key is hidden, all count alike."""
    dead = _dead(inputs)
    if not bool(dead.any()) or case.sinks is not None:
        return None
    flat = {"q": inputs["q"].masked_fill(dead, 0.0), "visible": inputs["visible"] | dead}
    if case.alibi is not None:
        flat["distance"] = inputs["distance"].masked_fill(dead, 0)
    return case, {**inputs, **flat}


def _nan_where(rows: Callable[[SdpaCase, Inputs], torch.Tensor]) -> dict[str, Any]:
    """NaN in the rows [batch, 1, q_len, 1] that `rows` gives; no fault where it gives none."""

    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        return (case, inputs) if bool(rows(case, inputs).any()) else None

    def answer_of(case: SdpaCase, out: Inputs) -> Inputs:
        bad = rows(case, case.inputs())
        faulty = {"out": out["out"].masked_fill(bad, math.nan)}
        return faulty | ({"lse": out["lse"].masked_fill(bad[..., 0], math.nan)} if case.lse else {})

    return {"question": ask, "answer_of": answer_of, "listed": False}


def _dead_without_sink(case: SdpaCase, inputs: Inputs) -> torch.Tensor:
    return _dead(inputs) & (case.sinks is None)


def _first_block_hidden(case: SdpaCase, inputs: Inputs) -> torch.Tensor:
    return ~inputs["visible"][..., :BLOCK].any(-1, keepdim=True) & ~_dead(inputs)


def _overflowing_mask(case: SdpaCase, inputs: Inputs) -> torch.Tensor:
    """(1 - m) * -1e9 in float16 is 0 * -inf wherever a key is visible."""
    masked = case.dtype == "float16" and not bool(inputs["visible"].all())
    return ~_dead(inputs) & masked


# Heads and batches ---------------------------------------------------------------------------


def _first_request(case: SdpaCase, inputs: Inputs) -> Question | None:
    """With a single kv head, the stride of its axis is taken for that of the batch."""
    if case.kv_heads > 1 or case.batch == 1:
        return None
    k, v = (inputs[name][:1].expand_as(inputs[name]) for name in ("k", "v"))
    return case, {**inputs, "k": k, "v": v}


def _regrouped(case: SdpaCase, inputs: Inputs) -> Question | None:
    """The kv head is h // kv_heads instead of h // (heads / kv_heads)."""
    order = (torch.arange(case.heads) // case.kv_heads).clamp_max(case.kv_heads - 1)
    if torch.equal(order, torch.arange(case.heads) // (case.heads // case.kv_heads)):
        return None
    wide = replace(case, kv_heads=case.heads)
    return wide, {**inputs, "k": inputs["k"][:, order], "v": inputs["v"][:, order]}


def _done(case: SdpaCase) -> torch.Tensor:
    """bool [heads]: heads that blocks b are given by (b % G) * G + b // G, G heads a kv head."""
    group, block = case.heads // case.kv_heads, torch.arange(case.heads)
    head = (block % group) * group + block // group
    done = torch.zeros(case.heads, dtype=torch.bool)
    done[head[head < case.heads]] = True
    return done


def _heads_left_out(case: SdpaCase, out: Inputs) -> Inputs:
    """Heads that no block is given are not written."""
    left = ~_done(case)[:, None]
    faulty = {"out": out["out"].masked_fill(left[..., None], 0.0)}
    return faulty | ({"lse": out["lse"].masked_fill(left, 0.0)} if case.lse else {})


def _lse_transposed(case: SdpaCase, out: Inputs) -> Inputs:
    """[q_len, heads] memory taken for [heads, q_len]."""
    lse = out["lse"]
    return {**out, "lse": lse.mT.reshape(lse.shape)}


def _sink(change: Callable[[SdpaCase, torch.Tensor], torch.Tensor | None]) -> Ask:
    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        wrong = None if case.sinks is None else change(case, inputs["sinks"].double())
        return None if wrong is None else (case, {**inputs, "sinks": wrong})

    return ask


# ALiBi ---------------------------------------------------------------------------------------


def _slopes(change: Callable[[SdpaCase, torch.Tensor], torch.Tensor | None]) -> Ask:
    """Other slopes [heads] than those given; no fault where `change` gives none, or the same."""

    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        right = None if case.alibi is None else inputs["alibi"].double()
        wrong = None if right is None else change(case, right)
        if wrong is None or torch.equal(wrong, inputs["alibi"].double()):
            return None
        return case, {**inputs, "alibi": wrong}

    return ask


def _distances(change: Callable[[SdpaCase, Inputs], torch.Tensor | None]) -> Ask:
    """Other distances [batch, 1, q_len, kv_len]; no fault where `change` gives none."""

    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        wrong = None if case.alibi is None else change(case, inputs)
        return None if wrong is None else (case, {**inputs, "distance": wrong})

    return ask


def _slopes_without_powers(case: SdpaCase, slopes: torch.Tensor) -> torch.Tensor:
    """2^(-8 i / n), whatever n is."""
    assert case.alibi is not None
    return torch.exp2(-case.alibi / case.heads * torch.arange(1, case.heads + 1).double())


def _slopes_of_a_rank(case: SdpaCase, slopes: torch.Tensor) -> torch.Tensor | None:
    """Two ranks of tensor parallelism have half of the heads each, both with the first slopes."""
    if case.heads % 2:
        return None
    return slopes[: case.heads // 2].repeat(2)


def _no_bias_in_decode(case: SdpaCase, inputs: Inputs) -> torch.Tensor | None:
    """The bias has a position for each query, and is the same for all keys where there is one."""
    single = [start for start, end, _ in case.steps() if end - start == 1]
    if not single:
        return None
    distance = inputs["distance"].clone()
    distance[:, :, single] = 0
    return distance


def _key_positions(inputs: Inputs) -> torch.Tensor:
    """int [batch, 1, 1, kv_len], from 0 for the first slot."""
    return inputs["distance"][:, :, :1, :1] - inputs["distance"][:, :, :1]


def _from_first_key(case: SdpaCase, inputs: Inputs) -> torch.Tensor | None:
    """slope * (position of the key) is added: the same weights, but not beside a sink."""
    if case.sinks is None and not case.lse:
        return None
    return (-_key_positions(inputs)).expand_as(inputs["distance"])


def _off_by_one(case: SdpaCase, inputs: Inputs) -> torch.Tensor | None:
    """The last key is at distance 1: the same weights, but not beside a sink."""
    return None if case.sinks is None and not case.lse else inputs["distance"] + 1


def _symmetric(case: SdpaCase, inputs: Inputs) -> torch.Tensor | None:
    """Keys of the future are lowered as those of the past are."""
    distance = inputs["distance"]
    return distance.abs() if bool((inputs["visible"] & (distance < 0)).any()) else None


def _bias_capped(case: SdpaCase, inputs: Inputs) -> Question | None:
    """The bias is added before the softcap: two more columns, (-slope i, slope) * (1, j)."""
    if case.alibi is None or case.softcap is None:
        return None
    distance, group = inputs["distance"].double(), case.heads // case.kv_heads
    slope = inputs["alibi"].double()[:, None, None] / case.softmax_scale
    q, k = inputs["q"].double(), inputs["k"].double().repeat_interleave(group, 1)
    row, key = -slope * distance[..., :1], _key_positions(inputs).double().mT
    other = replace(
        case, kv_heads=case.heads, head_dim=case.head_dim + 2, scale=case.softmax_scale, alibi=None
    )
    return other, {
        **inputs,
        "q": torch.cat([q, row, slope.expand_as(row)], -1),
        "k": torch.cat([k, torch.ones_like(k[..., :1]), key.expand_as(k[..., :1])], -1),
        "v": inputs["v"].repeat_interleave(group, 1),
    }


# Rounding ------------------------------------------------------------------------------------


def _says(case: SdpaCase, out: torch.Tensor, lse: torch.Tensor) -> Question:
    """The question that has this answer: each row sees one key, of that logit and that value."""
    eye = torch.eye(case.q_len, dtype=torch.bool)
    other = replace(
        case, kv_len=case.q_len, kv_heads=case.heads, head_dim=1, scale=1.0, softcap=None,
        sinks=None, schedule=(), kv_lens=None, q_lens=None, alibi=None,
    )  # fmt: skip
    return other, {
        "q": lse[..., None],
        "k": torch.ones(case.batch, case.heads, case.q_len, 1),
        "v": out,
        "visible": eye.expand(case.batch, 1, case.q_len, case.q_len) & lse.isfinite()[..., None],
    }


def _rounds(change: Callable[[SdpaCase, Inputs, torch.Tensor], torch.Tensor]) -> Ask:
    """16-bit kernels that give another output: `change` of the right one."""

    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        if case.dtype not in SHORT:
            return None
        right = replace(case, lse=True).expected(inputs)
        return _says(case, change(case, inputs, right["out"]), right["lse"])

    return ask


def _added_in_dtype(case: SdpaCase, inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
    """exp(s - max) v is added key by key to an accumulator of the case's dtype."""
    total = torch.zeros_like(out)
    for key, weight in _weights(case, inputs):
        total = nearest(total + weight * key, case.dtype)
    count = torch.zeros(())
    for _, weight in _weights(case, inputs):
        count = count + weight
    return torch.where(count == 0, out, total / count.clamp_min(1e-300))


def _counted_in_dtype(case: SdpaCase, inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
    """The softmax's denominator is an accumulator of the case's dtype."""
    count, exact = torch.zeros(()), torch.zeros(())
    for _, weight in _weights(case, inputs):
        count, exact = nearest(count + weight, case.dtype), exact + weight
    return torch.where(count == 0, out, out * exact / count.clamp_min(1e-300))


def _weights(case: SdpaCase, inputs: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(value [B, H, 1, D], exp(score - max) [B, H, Lq, 1]) of the sink, if any, and each key."""
    group = case.heads // case.kv_heads
    k, v = (inputs[name].double().repeat_interleave(group, 1) for name in ("k", "v"))
    scores = case.softmax_scale * (inputs["q"].double() @ k.mT)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi is not None:
        scores = scores - inputs["alibi"].double()[:, None, None] * inputs["distance"]
    scores = scores.masked_fill(~inputs["visible"], -torch.inf)
    if case.sinks is not None:
        sink = inputs["sinks"].double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([sink, scores], -1)
        v = torch.nn.functional.pad(v, (0, 0, 1, 0))
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
    v = v.masked_fill(~(weights > 0).any(-2)[..., None], 0.0)  # poison meets no arithmetic
    return list(zip(v[:, :, :, None].unbind(2), weights[..., None].unbind(3), strict=True))


def _low_operands(case: SdpaCase, inputs: Inputs) -> Question | None:
    """float32 inputs go through bfloat16 matrix units."""
    if case.dtype != "float32":
        return None
    return case, {**inputs, **{name: inputs[name].bfloat16().float() for name in ("q", "k", "v")}}


# State between calls -------------------------------------------------------------------------


def _window_of_the_first_call() -> Ask:
    """One mask is made in the first layer that has a window, and serves every later one."""
    first: list[int] = []

    def ask(case: SdpaCase, inputs: Inputs) -> Question | None:
        if case.window is None:
            return None
        first.append(case.window)
        return _visible(replace(case, window=first[0]), inputs)

    return ask


def _dropout() -> Ask:
    """A tenth of the weights is dropped, others in every call."""
    calls: list[None] = []

    def ask(case: SdpaCase, inputs: Inputs) -> Question:
        calls.append(None)
        shape = (case.batch, case.heads, case.q_len, case.kv_len)
        kept = values.integers(len(calls), "dropout", shape, 0, 9) > 0
        wide = replace(case, kv_heads=case.heads)
        group = case.heads // case.kv_heads
        k, v = (inputs[name].repeat_interleave(group, 1) for name in ("k", "v"))
        return wide, {**inputs, "k": k, "v": v, "visible": inputs["visible"] & kept}

    return ask


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
        bugs=("B013", "B014", "B015", "B062"),
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
        name="window-padded-by-full-lengths",
        bugs=(),
        sentence="windows of a ragged batch hidden by the padding of the whole requests",
        question=_padded_to_the_full,
    ),
    Defect(
        name="scale-plus-0.1%",
        bugs=(),
        sentence="scores scaled by 1.001 too much",
        question=_scaled(1.001),
    ),
    Defect(
        name="scale-ignored",
        bugs=("B075",),
        sentence="scale ignored: 1/sqrt(head_dim) used instead",
        question=lambda case, inputs: (
            None if case.scale is None else (replace(case, scale=None), inputs)
        ),
    ),
    Defect(
        name="mask-added",
        bugs=("B012",),
        sentence="mask added to the scores instead of hiding keys",
        question=_mask_added,
    ),
    Defect(
        name="mask-over-heads",
        bugs=("B026",),
        sentence="masks of the requests applied to the kv heads",
        question=_mask_over_heads,
    ),
    Defect(
        name="mask-replaced",
        bugs=("B029",),
        sentence="padding mask replaced by a causal one: padding is read",
        question=_mask_replaced,
    ),
    Defect(
        name="mask-read-ragged",
        bugs=("B040",),
        sentence="padded mask read as a ragged one",
        question=_mask_read_ragged,
    ),
    Defect(
        name="query-masked-by-oldest-key",
        bugs=("B042",),
        sentence="new token zeroed where the oldest key is padding",
        question=_oldest_pad_bit,
    ),
    Defect(
        name="keys-past-the-end",
        bugs=("B024", "B062"),
        sentence="last row attends to zeros past the last key, up to a whole block",
        question=_past_the_end,
    ),
    Defect(
        name="tail-of-one-dropped",
        bugs=("B081",),
        sentence="last key missing where it stands alone in a vector of 32",
        question=_tail_of_one,
    ),
    Defect(
        name="dead-rows-average",
        bugs=("B063", "B086"),
        sentence="rows that see no key get the mean of all values",
        question=_dead_rows_average,
    ),
    Defect(
        name="dead-rows-nan",
        bugs=("B063", "B086"),
        sentence="rows that see no key are NaN",
        **_nan_where(_dead_without_sink),
    ),
    Defect(
        name="hidden-block-nan",
        bugs=("B079",),
        sentence="rows whose first block of keys is hidden are NaN",
        **_nan_where(_first_block_hidden),
    ),
    Defect(
        name="mask-overflows",
        bugs=("B082",),
        sentence="additive float16 mask overflows: visible keys get 0 * -inf",
        **_nan_where(_overflowing_mask),
    ),
    Defect(
        name="first-request-for-all",
        bugs=("B025",),
        sentence="every request attends to the first one's keys",
        question=_first_request,
    ),
    Defect(
        name="heads-regrouped",
        bugs=("B050",),
        sentence="kv head of query head h is h // kv_heads",
        question=_regrouped,
    ),
    Defect(
        name="heads-left-out",
        bugs=("B049",),
        sentence="heads not written: the group size is taken for the number of kv heads",
        question=lambda case, inputs: None if bool(_done(case).all()) else (case, inputs),
        answer_of=_heads_left_out,
    ),
    Defect(
        name="lse-transposed",
        bugs=("B077",),
        sentence="lse written query by query instead of head by head",
        question=lambda case, inputs: (case, inputs) if case.lse else None,
        answer_of=_lse_transposed,
    ),
    Defect(
        name="sink-twice",
        bugs=("B036",),
        sentence="sinks counted twice in the denominator",
        question=_sink(lambda case, sinks: sinks + math.log(2)),
    ),
    Defect(
        name="sink-of-the-first-head",
        bugs=("B078",),
        sentence="sink of the first head for all that share its keys",
        question=_sink(
            lambda case, sinks: sinks[:1].expand_as(sinks) if case.kv_heads == 1 else None
        ),
    ),
    Defect(
        name="alibi-ignored",
        bugs=(),
        sentence="ALiBi ignored",
        question=_without("alibi"),
    ),
    Defect(
        name="alibi-ignored-in-decode",
        bugs=("B046",),
        sentence="ALiBi ignored where a step has a single query",
        question=_distances(_no_bias_in_decode),
    ),
    Defect(
        name="alibi-sign",
        bugs=(),
        sentence="ALiBi raises distant keys instead of lowering them",
        question=_slopes(lambda case, slopes: -slopes),
    ),
    Defect(
        name="alibi-scaled",
        bugs=(),
        sentence="ALiBi's bias multiplied by the softmax scale",
        question=_slopes(lambda case, slopes: slopes * case.softmax_scale),
    ),
    Defect(
        name="alibi-twice",
        bugs=(),
        sentence="ALiBi's bias added twice: to the scores, and in the mask",
        question=_slopes(lambda case, slopes: 2 * slopes),
    ),
    Defect(
        name="alibi-capped",
        bugs=(),
        sentence="ALiBi's bias added before the softcap",
        question=_bias_capped,
    ),
    Defect(
        name="alibi-of-the-next-head",
        bugs=(),
        sentence="ALiBi slope of the next head",
        question=_slopes(lambda case, slopes: slopes.roll(-1)),
    ),
    Defect(
        name="alibi-tiled",
        bugs=(),
        sentence="ALiBi slopes of as many heads as have keys, tiled over the query heads",
        question=_slopes(lambda case, slopes: slopes[_order(case)] if case.kv_heads > 1 else None),
    ),
    Defect(
        name="alibi-of-the-first-head",
        bugs=("B078",),
        sentence="ALiBi slope of the first head for all that share its keys",
        question=_slopes(
            lambda case, slopes: slopes[:1].expand_as(slopes) if case.kv_heads == 1 else None
        ),
    ),
    Defect(
        name="alibi-of-the-first-rank",
        bugs=("B047",),
        sentence="ALiBi slopes of the first half of the heads for both halves",
        question=_slopes(_slopes_of_a_rank),
    ),
    Defect(
        name="alibi-without-powers",
        bugs=("B043",),
        sentence="ALiBi slopes 2^(-8 i / heads), though heads is no power of two",
        question=_slopes(_slopes_without_powers),
    ),
    Defect(
        name="alibi-off-by-one",
        bugs=("B045",),
        sentence="ALiBi's distances off by one: the query's own position is at 1",
        question=_distances(_off_by_one),
    ),
    Defect(
        name="alibi-from-the-first-key",
        bugs=(),
        sentence="ALiBi's bias counted from the first key instead of back from the query",
        question=_distances(_from_first_key),
    ),
    Defect(
        name="alibi-symmetric",
        bugs=(),
        sentence="ALiBi lowers keys of the future too: the distance has lost its sign",
        question=_distances(_symmetric),
    ),
    Defect(
        name="accumulated-in-dtype",
        bugs=(),
        sentence="values added up in the case's own dtype",
        question=_rounds(_added_in_dtype),
        rounding=True,
        listed=False,
    ),
    Defect(
        name="denominator-in-dtype",
        bugs=(),
        sentence="softmax denominator added up in the case's own dtype",
        question=_rounds(_counted_in_dtype),
        rounding=True,
        listed=False,
    ),
    Defect(
        name="operands-bfloat16",
        bugs=(),
        sentence="float32 inputs rounded to bfloat16",
        question=_low_operands,
    ),
    Defect(
        name="truncated",
        bugs=(),
        sentence="output truncated instead of rounded",
        question=_rounds(lambda case, inputs, out: truncated(out, case.dtype)),
        rounding=True,
        listed=False,
    ),
)
"""The fault dictionary, but for what can't be looked for; all of it is planted by the tests."""

LASTING = (
    Lasting(
        name="window-of-the-first-call",
        bugs=("B007", "B043"),
        sentence="window of an earlier call",
        begin=_window_of_the_first_call,
    ),
    Lasting(
        name="dropout-in-inference",
        bugs=("B084",),
        sentence="dropout is active: other weights are missing in every call",
        begin=_dropout,
    ),
)
