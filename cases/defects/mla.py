"""Wrong versions of latent attention."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from cases.case import Inputs
from cases.defects import Ask, Defect, Lasting, Question
from cases.defects._rounding import SHORT, truncated
from cases.mla import MlaCase
from references import mla as reference


def _scaled(by: Callable[[MlaCase], float | None]) -> Ask:
    """The softmax scale times `by`, by way of mscale; None: the fault can't show."""

    def ask(case: MlaCase, inputs: Inputs) -> Question | None:
        factor = by(case)
        if factor is None or factor == 1:
            return None
        return replace(case, mscale=(case.mscale or 1.0) * math.sqrt(factor)), inputs

    return ask


def _mscale(power: float) -> Ask:
    """mscale**power in the scale, where mscale**2 is meant."""
    return _scaled(lambda case: None if case.mscale is None else case.mscale ** (power - 2))


def _weights(change: Callable[[MlaCase, Inputs], Inputs | None]) -> Ask:
    def ask(case: MlaCase, inputs: Inputs) -> Question | None:
        changed = change(case, inputs)
        return None if changed is None else (case, {**inputs, **changed})

    return ask


def _swapped(case: MlaCase, inputs: Inputs) -> Inputs | None:
    if case.nope_dim != case.v_dim:
        return None
    return {"w_uk": inputs["w_uv"].mT, "w_uv": inputs["w_uk"].mT}


def _by_kind(case: MlaCase, inputs: Inputs) -> Inputs | None:
    """kv_b_proj cut as if all rows of W_UK came first: they alternate with W_UV, head by head."""
    if case.heads == 1:
        return None
    latent = case.latent_dim
    rows = torch.cat([inputs["w_uk"], inputs["w_uv"].mT], 1).reshape(-1, latent)
    w_uk, w_uv = rows.split((case.heads * case.nope_dim, case.heads * case.v_dim))
    return {
        "w_uk": w_uk.reshape(case.heads, case.nope_dim, latent),
        "w_uv": w_uv.reshape(case.heads, case.v_dim, latent).mT,
    }


def _k_pe_first(case: MlaCase, inputs: Inputs) -> Question:
    """New rows are written as [k_pe, latent]; the prefix was written, and all is read, rightly."""
    row = torch.cat([inputs["k_pe"], inputs["latent"]], -1)
    latent, k_pe = row.split((case.latent_dim, case.rope_dim), -1)
    return case, {**inputs, "latent": latent, "k_pe": k_pe}


def _masked(change: Callable[[MlaCase, torch.Tensor, torch.Tensor], torch.Tensor | None]) -> Ask:
    """Another choice of visible keys, made from (case, right choice [T, K], key positions [K])."""

    def ask(case: MlaCase, inputs: Inputs) -> Question | None:
        right = _seen(case, inputs)
        wrong = change(case, right, torch.arange(case.kv_len))
        if wrong is None or torch.equal(wrong, right):
            return None
        return case, {**inputs, "visible": wrong}

    return ask


def _seen(case: MlaCase, inputs: Inputs) -> torch.Tensor:
    """bool [T, kv_len]: what each row sees."""
    found = torch.zeros(case.rows, case.kv_len, dtype=torch.bool)
    start = 0
    for mask in case.visible(inputs):
        found[start : start + len(mask), : mask.shape[1]] = mask
        start += len(mask)
    return found


def _lengths(case: MlaCase) -> tuple[torch.Tensor, torch.Tensor]:
    """(new tokens, keys) of the request of each row, int64 [T, 1]; zeros for padding."""
    counts = torch.tensor(case.lengths())
    each = counts.repeat_interleave(counts[0], 1)
    each = torch.nn.functional.pad(each, (0, case.padding))
    return each[0, :, None], each[1, :, None]


def _last_key(case: MlaCase, seen: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return seen & (key != _lengths(case)[1] - 1)


def _one_ahead(case: MlaCase, seen: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    position = seen.sum(-1, keepdim=True) - 1
    return seen | ((key == position + 1) & (key < _lengths(case)[1]))


def _one_behind(case: MlaCase, seen: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return seen & (key < seen.sum(-1, keepdim=True) - 1)


def _upper_left(case: MlaCase, seen: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    counts, lengths = _lengths(case)
    return seen & (key <= seen.sum(-1, keepdim=True) - 1 - (lengths - counts))


def _no_prefix(case: MlaCase, seen: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    counts, lengths = _lengths(case)
    return seen & (key >= lengths - counts)


def _used(case: MlaCase) -> list[int]:
    """Pages of each request."""
    page = case.page_size or case.kv_len
    return [-(-k // page) for k in case.lengths()[1]]


def _identity_table(case: MlaCase, inputs: Inputs) -> Question | None:
    if case.page_size is None:
        return None
    table = inputs["table"].clone()
    for request, count in enumerate(_used(case)):
        table[request, :count] = torch.arange(count, dtype=table.dtype)
    return case, {**inputs, "table": table}


def _other_units(case: MlaCase, inputs: Inputs) -> Question | None:
    """Page ids multiplied by the page size a second time, and wrapped where they lead outside."""
    if case.page_size in (None, 1):
        return None
    table = inputs["table"] * case.page_size % inputs["cache"].shape[0]
    return case, {**inputs, "table": table}


def _wrapped_ids(case: MlaCase, inputs: Inputs) -> Question | None:
    """Page times stride overflows: ids wrap, here after half of the pages."""
    half = inputs["cache"].shape[0] // 2
    return None if case.page_size is None else (case, {**inputs, "table": inputs["table"] % half})


def _stale_page(case: MlaCase, inputs: Inputs) -> Question | None:
    """The last page of each request is the one that stood before it in the list of all pages."""
    if case.page_size is None:
        return None
    table, used = inputs["table"].clone(), _used(case)
    pages = torch.cat([table[b, :count] for b, count in enumerate(used)])
    end = 0
    for request, count in enumerate(used):
        end += count
        if count:
            table[request, count - 1] = pages[(end - 2) % len(pages)] if len(pages) > 1 else 0
    return case, {**inputs, "table": table}


def _slots(change: Callable[[MlaCase, Inputs, torch.Tensor], torch.Tensor | None]) -> Ask:
    def ask(case: MlaCase, inputs: Inputs) -> Question | None:
        wrong = change(case, inputs, inputs["slots"].clone())
        return None if wrong is None else (case, {**inputs, "slots": wrong})

    return ask


def _negative_written(case: MlaCase, inputs: Inputs, slots: torch.Tensor) -> torch.Tensor | None:
    """Slot -1 as Python takes it: the last row of the cache."""
    if not case.padding:
        return None
    last = inputs["cache"].shape[0] * inputs["cache"].shape[1] - 1
    slots[slots == last] = -1  # its own row is overwritten
    slots[case.tokens] = last
    return slots


def _stale_slots(case: MlaCase, inputs: Inputs, slots: torch.Tensor) -> torch.Tensor | None:
    """Padding rows keep the slots that an earlier step had there: live rows by now."""
    del inputs
    count = min(case.padding, case.tokens)
    if not count:
        return None
    slots[case.tokens : case.tokens + count] = slots[:count]
    slots[:count] = -1
    return slots


def _relative_slots(case: MlaCase, inputs: Inputs, slots: torch.Tensor) -> torch.Tensor | None:
    """Positions are counted from the first new token, without what is cached already."""
    queries, keys = case.lengths()
    if queries == keys:
        return None
    page = case.page_size or case.kv_len
    start = 0
    for request, count in enumerate(queries):
        at = torch.arange(count)
        slots[start : start + count] = inputs["table"][request, at // page] * page + at % page
        start += count
    return slots


def _on_rows(
    change: Callable[[MlaCase, torch.Tensor, Inputs], tuple[torch.Tensor, Inputs] | None],
) -> Ask:
    """The same question with every row in place, [B, K, L + R] float64, and then changed.

    `change` gives the new rows, which may have more columns (the rotated part grows) or more keys,
    and the inputs that go with them: `q_pe` for the former, `visible` for the latter.
    """

    def ask(case: MlaCase, inputs: Inputs) -> Question | None:
        cache = case.written(inputs)
        rows = torch.zeros(case.batch, case.kv_len, case.width, dtype=torch.float64)
        for b, length in enumerate(case.lengths()[1]):
            rows[b, :length] = reference.gather_rows(cache, inputs["table"][b], length).double()
        changed = change(case, rows, inputs)
        if changed is None:
            return None
        rows, more = changed
        keys, rope = rows.shape[1], rows.shape[2] - case.latent_dim
        other = replace(
            case,
            page_size=None,
            poison="finite",
            kv_len=keys,
            kv_lens=(keys,) * case.batch,
            rope_dim=rope,
            mscale=math.sqrt(case.softmax_scale * math.sqrt(case.nope_dim + rope)),
            schedule=(),
        )
        return other, {
            **inputs,
            "visible": _seen(case, inputs),
            "cache": rows,
            "table": torch.arange(case.batch, dtype=torch.int32)[:, None],
            "slots": torch.full((case.rows,), -1),
            "k_pe": torch.zeros(case.rows, rope, dtype=torch.float64),
            **more,
        }

    return ask


def _column_dropped(
    case: MlaCase, rows: torch.Tensor, inputs: Inputs
) -> tuple[torch.Tensor, Inputs] | None:
    del inputs
    rows[..., case.latent_dim - 1] = 0
    return rows, {}


def _tail_counted(
    case: MlaCase, rows: torch.Tensor, inputs: Inputs
) -> tuple[torch.Tensor, Inputs] | None:
    """Rows of the last page past the end are erased, and then have a score of 0."""
    page = case.page_size
    if page is None or all(k % page == 0 for k in case.lengths()[1]):
        return None
    rows = torch.nn.functional.pad(rows, (0, 0, 0, page))
    for b, length in enumerate(case.lengths()[1]):
        rows[b, length:] = 0
    key, lengths = torch.arange(rows.shape[1]), _lengths(case)[1]
    seen = torch.nn.functional.pad(_seen(case, inputs), (0, page))
    return rows, {
        "visible": seen | ((key >= lengths) & (key < (lengths + page - 1) // page * page))
    }


def _merged(change: Callable[[MlaCase, torch.Tensor, torch.Tensor], torch.Tensor]) -> Ask:
    """Parts merged with other weights: `change` gives what is added to each part's log-weight.

    It gets (case, lse, top) of the parts, [T, H, S], -inf for an empty one. What is added to all
    scores of a part goes into extra columns of q_pe, which meet a 1 in the keys of that part.
    """

    def bias(
        case: MlaCase, rows: torch.Tensor, inputs: Inputs
    ) -> tuple[torch.Tensor, Inputs] | None:
        if case.splits == 1:
            return None
        part = _parts(case)
        lse, top = _part_sums(case, rows, inputs, part)
        if int((lse > -torch.inf).sum(-1).max()) < 2:
            return None
        added = change(case, lse, top).masked_fill(lse == -torch.inf, 0.0)
        owner = torch.nn.functional.one_hot(part, case.splits).double()
        q_pe = torch.cat([inputs["q_pe"].double(), added / case.softmax_scale], -1)
        return torch.cat([rows, owner], -1), {"q_pe": q_pe}

    return _on_rows(bias)


def _parts(case: MlaCase) -> torch.Tensor:
    """int64 [B, K]: the part of each key."""
    size = torch.tensor([max(1, -(-k // case.splits)) for k in case.lengths()[1]])
    return (torch.arange(case.kv_len) // size[:, None]).clamp_max(case.splits - 1)


def _part_sums(
    case: MlaCase, rows: torch.Tensor, inputs: Inputs, part: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-sum-exp, maximum) of every part, float64 [T, H, S]; -inf where a row sees none of it."""
    q_latent = reference.absorb(inputs["q_nope"], inputs["w_uk"])
    query = torch.cat([q_latent, inputs["q_pe"].double()], -1)
    counts = torch.tensor(case.lengths()[0])
    request = torch.arange(case.batch).repeat_interleave(counts)
    request = torch.nn.functional.pad(request, (0, case.padding))
    scores = case.softmax_scale * (query @ rows[request].mT)
    held = part[request, :, None] == torch.arange(case.splits)
    held = held & _seen(case, inputs)[..., None]
    apart = scores[..., None].masked_fill(~held[:, None], -torch.inf)
    return apart.logsumexp(-2), apart.amax(-2)


def _empty_merged(
    case: MlaCase, rows: torch.Tensor, inputs: Inputs
) -> tuple[torch.Tensor, Inputs] | None:
    """An empty part has an output of zeros and, not initialised, a log-sum-exp of 0, not -inf."""
    if case.splits == 1:
        return None
    lse, _ = _part_sums(case, rows, inputs, _parts(case))
    empty = (lse == -torch.inf).sum(-1)  # [T, H]
    if not bool(empty[: case.tokens].any()):
        return None
    rows = torch.nn.functional.pad(rows, (0, 1, 0, 1))
    rows[:, -1, -1] = 1  # one more key, of value 0, whose logit is log(empty parts)
    weight = torch.log(empty.double().clamp_min(1)) / case.softmax_scale
    q_pe = torch.cat([inputs["q_pe"].double(), weight[..., None]], -1)
    seen = torch.cat([_seen(case, inputs), empty[:, :1] > 0], -1)
    return rows, {"q_pe": q_pe, "visible": seen}


def _other_strides(case: MlaCase, inputs: Inputs) -> torch.Tensor | None:
    """[T, H, L]: the last part's output, whose heads stand L + R apart, is read as if they stood L
    apart like those of the merge's other operand."""
    if case.splits == 1 or case.heads == 1:
        return None
    part = _parts(case)
    visible = _seen(case, inputs)
    total = torch.zeros(case.rows, case.heads, case.latent_dim, dtype=torch.float64)
    cache, start = case.written(inputs), 0
    for request, (count, length) in enumerate(zip(*case.lengths(), strict=True)):
        mine = slice(start, start + count)
        start += count
        if not count:
            continue
        rows = reference.gather_rows(cache, inputs["table"][request], length)
        outs, lses = [], []
        for index in range(case.splits):
            seen = visible[mine, :length] & (part[request, :length] == index)
            q_latent = reference.absorb(inputs["q_nope"][mine], inputs["w_uk"])
            out, lse = reference.attend(
                q_latent, inputs["q_pe"][mine], rows, seen, case.softmax_scale
            )
            outs.append(out)
            lses.append(lse)
        wide = torch.nn.functional.pad(outs[-1], (0, case.rope_dim)).flatten(1)
        outs[-1] = wide[:, : case.heads * case.latent_dim].reshape(outs[0].shape)
        total[mine], _ = reference.merge(torch.stack(outs), torch.stack(lses))
    return total


def _misread_part(case: MlaCase, inputs: Inputs) -> Question | None:
    wrong = _other_strides(case, inputs)
    return None if wrong is None else (case, {**inputs, "o_latent": wrong})


def _misread_latent(case: MlaCase, out: Inputs) -> Inputs:
    wrong = _other_strides(case, case.inputs()) if "o_latent" in out else None
    return out if wrong is None else {**out, "o_latent": wrong}


def _short(case: MlaCase, inputs: Inputs) -> Question | None:
    return (case, inputs) if case.dtype in SHORT else None


def _truncated(case: MlaCase, out: Inputs) -> Inputs:
    return {**out, "out": truncated(out["out"], case.dtype)}


def _low_operands(case: MlaCase, inputs: Inputs) -> Question | None:
    """float32 tensors go through bfloat16 matrix units; what is stored is right."""
    if case.dtype != "float32":
        return None
    names = ("q_nope", "q_pe", "latent", "k_pe", "cache", "w_uk", "w_uv")
    return case, {**inputs, **{name: inputs[name].bfloat16().float() for name in names}}


def _scale_of_the_first_call() -> Ask:
    """The softmax scale is computed once."""
    first: list[float] = []

    def ask(case: MlaCase, inputs: Inputs) -> Question:
        first.append(case.softmax_scale)
        mscale = math.sqrt(first[0] * math.sqrt(case.nope_dim + case.rope_dim))
        return replace(case, mscale=mscale), inputs

    return ask


def _own_cache(case: MlaCase, out: Inputs) -> Inputs:
    """The fault is not in what is written: the cache comes out right."""
    if "cache" not in out:
        return out
    return {**out, "cache": case.written(case.inputs()).double()}


_LN2 = math.log(2)

DEFECTS = (
    Defect(
        name="scale-of-the-latent-row",
        bugs=("B160",),
        sentence="scores scaled by 1/sqrt(latent + rope) instead of 1/sqrt(nope + rope)",
        question=_scaled(
            lambda case: math.sqrt((case.nope_dim + case.rope_dim) / case.width)
        ),
    ),
    Defect(
        name="scale-without-rope",
        bugs=(),
        sentence="scores scaled by 1/sqrt(nope) instead of 1/sqrt(nope + rope)",
        question=_scaled(lambda case: math.sqrt(1 + case.rope_dim / case.nope_dim)),
    ),
    Defect(
        name="mscale-missing",
        bugs=("B070", "B074", "B088", "B095"),
        sentence="mscale missing from the softmax scale",
        question=_mscale(0),
    ),
    Defect(
        name="mscale-once",
        bugs=(),
        sentence="mscale in the softmax scale once, not squared",
        question=_mscale(1),
    ),
    Defect(
        name="mscale-twice",
        bugs=(),
        sentence="mscale squared applied twice",
        question=_mscale(4),
    ),
    Defect(
        name="exp-base-two",
        bugs=("B069",),
        sentence="softmax with exp2 of scores that lack log2(e)",
        question=_scaled(lambda case: _LN2),
    ),
    Defect(
        name="k-pe-first",
        bugs=(),
        sentence="rows written as k_pe and then the latent",
        question=_k_pe_first,
    ),
    Defect(
        name="k-pe-ignored",
        bugs=("B159",),
        sentence="rotated columns left out of the scores",
        question=_weights(lambda case, inputs: {"q_pe": torch.zeros_like(inputs["q_pe"])}),
    ),
    Defect(
        name="weights-swapped",
        bugs=(),
        sentence="W_UK and W_UV swapped",
        question=_weights(_swapped),
    ),
    Defect(
        name="weights-by-kind",
        bugs=(),
        sentence="kv_b_proj cut as all keys, then all values, instead of head by head",
        question=_weights(_by_kind),
    ),
    Defect(
        name="w-uk-transposed",
        bugs=(),
        sentence="W_UK transposed",
        question=_weights(
            lambda case, inputs: {
                "w_uk": inputs["w_uk"].reshape(case.heads, case.latent_dim, case.nope_dim).mT
            }
        ),
    ),
    Defect(
        name="w-uv-transposed",
        bugs=(),
        sentence="W_UV transposed",
        question=_weights(
            lambda case, inputs: {
                "w_uv": inputs["w_uv"].reshape(case.heads, case.v_dim, case.latent_dim).mT
            }
        ),
    ),
    Defect(
        name="last-key-missing",
        bugs=(),
        sentence="newest key of every request missing",
        question=_masked(_last_key),
    ),
    Defect(
        name="causal-plus-one",
        bugs=(),
        sentence="causal off by one: one key of the future visible",
        question=_masked(_one_ahead),
    ),
    Defect(
        name="causal-minus-one",
        bugs=(),
        sentence="causal off by one: a token does not see itself",
        question=_masked(_one_behind),
    ),
    Defect(
        name="upper-left",
        bugs=(),
        sentence="causal mask aligned to the upper left: the cached prefix shifts it",
        question=_masked(_upper_left),
    ),
    Defect(
        name="prefix-ignored",
        bugs=("B162",),
        sentence="cached prefix ignored: only the new tokens are attended",
        question=_masked(_no_prefix),
    ),
    Defect(
        name="table-as-identity",
        bugs=(),
        sentence="page table read as the identity",
        question=_identity_table,
    ),
    Defect(
        name="page-ids-in-other-units",
        bugs=("B163", "B164"),
        sentence="page ids taken in other units: rows, or blocks of several pages",
        question=_other_units,
    ),
    Defect(
        name="stale-page",
        bugs=(),
        sentence="last page of a request is another, stale one",
        question=_stale_page,
    ),
    Defect(
        name="tail-counted",
        bugs=("B152", "B153", "B154"),
        sentence="rows of the last page past the end counted, as zeros",
        question=_on_rows(_tail_counted),
        answer_of=_own_cache,
    ),
    Defect(
        name="negative-slot-written",
        bugs=(),
        sentence="a negative slot written to the last row of the cache",
        question=_slots(_negative_written),
    ),
    Defect(
        name="stale-slots",
        bugs=("B149",),
        sentence="padding written to slots of an earlier step",
        question=_slots(_stale_slots),
    ),
    Defect(
        name="slots-without-prefix",
        bugs=("B151",),
        sentence="slots counted from the first new token, over the cached prefix",
        question=_slots(_relative_slots),
    ),
    Defect(
        name="latent-column-dropped",
        bugs=("B173",),
        sentence="last latent column dropped",
        question=_on_rows(_column_dropped),
        answer_of=_own_cache,
    ),
    Defect(
        name="lse-base-two-for-e",
        bugs=("B140", "B141"),
        sentence="parts merged with base-2 log-sum-exps taken for natural ones",
        question=_merged(lambda case, lse, top: lse * (1 / _LN2 - 1)),
        answer_of=_own_cache,
    ),
    Defect(
        name="lse-base-e-for-two",
        bugs=("B140", "B141"),
        sentence="parts merged with natural log-sum-exps taken for base 2",
        question=_merged(lambda case, lse, top: lse * (_LN2 - 1)),
        answer_of=_own_cache,
    ),
    Defect(
        name="lse-scaled-twice",
        bugs=("B170",),
        sentence="maximum scaled twice in the log-sum-exp that parts are merged with",
        question=_merged(lambda case, lse, top: top * (case.softmax_scale - 1)),
        answer_of=_own_cache,
    ),
    Defect(
        name="lse-of-another-head",
        bugs=("B018", "B169"),
        sentence="parts merged with the log-sum-exp of another head",
        question=_merged(lambda case, lse, top: lse.roll(1, 1).clamp_min(-1e9) - lse),
        answer_of=_own_cache,
    ),
    Defect(
        name="empty-part-merged",
        bugs=("B143",),
        sentence="a part without keys merged with a log-sum-exp of 0",
        question=_on_rows(_empty_merged),
        answer_of=_own_cache,
    ),
    Defect(
        name="page-ids-wrap",
        bugs=("B158",),
        sentence="page ids wrap around: page times stride overflows",
        question=_wrapped_ids,
    ),
    Defect(
        name="part-read-with-other-strides",
        bugs=("B144",),
        sentence="last part of the keys merged with the strides of the others",
        question=_misread_part,
        answer_of=_misread_latent,
    ),
    Defect(
        name="operands-bfloat16",
        bugs=(),
        sentence="float32 inputs rounded to bfloat16",
        question=_low_operands,
        answer_of=_own_cache,
    ),
    Defect(
        name="truncated",
        bugs=(),
        sentence="output truncated instead of rounded",
        question=_short,
        answer_of=_truncated,
        rounding=True,
        listed=False,
    ),
)  # fmt: skip
"""The fault dictionary: each is planted by the tests and looked for in every residual."""

LASTING = (
    Lasting(
        name="scale-of-the-first-call",
        bugs=(),
        sentence="softmax scale of an earlier call",
        begin=_scale_of_the_first_call,
    ),
)
