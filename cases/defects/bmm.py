"""Wrong versions of a batched matrix product: packing, tails, tiles, accumulation, scale."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cases.bmm import CODE_OF_ZERO, CODES_PER_SCALE, BmmCase
from cases.case import Inputs
from cases.defects import Ask, Defect, Lasting, Question
from cases.defects._rounding import nearest, truncated

ROWS = 16
"""Rows of an AMX tile, and columns of its result."""


def _group(case: BmmCase) -> int:
    """Neighbouring k in a VNNI group: as many elements as fill 32 bits."""
    return 4 // getattr(torch, case.dtype).itemsize


def _depth(case: BmmCase) -> int:
    return ROWS * _group(case)


def _says(case: BmmCase, answer: Tensor) -> Question:
    """The question that has this answer: nothing, plus the answer."""
    other = replace(
        case, k=1, alpha=1.0, beta=1.0, addend="full", a_layout="contiguous", b_layout="contiguous"
    )
    nothing = {name: torch.zeros(shape) for name, shape in _shapes(other).items()}
    return other, {**nothing, "c": answer}


def _shapes(case: BmmCase) -> dict[str, tuple[int, ...]]:
    return {"a": (case.batch, case.m, case.k), "b": (case.batch, case.k, case.n)}


def _with_b(change: Callable[[BmmCase, Tensor], Tensor | None]) -> Ask:
    """The kernel reads another B: `change` of a copy of it, or None where the fault can't show."""

    def ask(case: BmmCase, inputs: Inputs) -> Question | None:
        b = change(case, inputs["b"].clone())
        return None if b is None else (case, {**inputs, "b": b})

    return ask


def _answering(change: Callable[[BmmCase, Inputs, Tensor], Tensor | None]) -> Ask:
    """The kernel writes another result: `change` of the right one."""

    def ask(case: BmmCase, inputs: Inputs) -> Question | None:
        out = change(case, inputs, case.expected(inputs)["out"].clone())
        return None if out is None else _says(case, out)

    return ask


def _finished(case: BmmCase, inputs: Inputs, product: Tensor) -> Tensor:
    """alpha * product + beta * c in float64."""
    out = case.alpha * product
    return out + case.beta * inputs["c"].double() if "c" in inputs else out


# Packing -------------------------------------------------------------------------------------


def _pair_swapped(case: BmmCase, b: Tensor) -> Tensor | None:
    """In the last full group, two neighbouring k change places."""
    if case.k < 2:
        return None
    last = case.k - case.k % 2 - 2
    return torch.cat([b[:, :last], b[:, last : last + 2].flip(1), b[:, last + 2 :]], 1)


def _columns_paired(case: BmmCase, b: Tensor) -> Tensor | None:
    """Plain rows where groups of k are expected: [k/g, g, n] read as [k/g, n, g]."""
    group = _group(case)
    whole = case.k - case.k % group
    if whole == 0 or group == 1 or case.n == 1:
        return None
    read = b[:, :whole].reshape(case.batch, whole // group, case.n, group).mT
    return torch.cat([read.reshape(case.batch, whole, case.n), b[:, whole:]], 1)


def _panel_width(case: BmmCase, b: Tensor) -> Tensor | None:
    """Packed in panels of 16 columns, read in panels of 4."""
    if case.n % ROWS or case.k == 1:
        return None
    panels = b.unflatten(2, (-1, ROWS)).transpose(1, 2).reshape(case.batch, -1, case.k, 4)
    return panels.transpose(1, 2).reshape(case.batch, case.k, case.n)


def _block_48(case: BmmCase, b: Tensor) -> Tensor | None:
    """Columns past the last multiple of 32 are unpacked over again from the next row's first."""
    tail = case.n % 32
    if case.n < 33 or tail == 0:
        return None
    b[:, :, case.n - tail :] = b.roll(-1, 1)[:, :, :tail]
    return b


def _padding_of_a_whole_block(case: BmmCase, b: Tensor) -> Tensor | None:
    """k is a multiple of the block, and the padding is a block: the next matrix loses its first."""
    if case.batch == 1 or case.k % _depth(case):
        return None
    b[1:, : _depth(case)] = 0
    return b


# Strides -------------------------------------------------------------------------------------


def _transposed(case: BmmCase, b: Tensor) -> Tensor | None:
    """B's memory taken for [n, k]."""
    if min(case.n, case.k) == 1:
        return None
    return b.reshape(case.batch, case.n, case.k).mT


def _strides_of_a_ignored(case: BmmCase, inputs: Inputs) -> Question | None:
    """A's rows are taken from memory as if it were contiguous."""
    if case.a_layout not in ("transposed", "interleaved"):
        return None
    axes = (0, 2, 1) if case.a_layout == "transposed" else (1, 0, 2)
    a = inputs["a"].permute(axes).reshape(case.batch, case.m, case.k)
    return case, {**inputs, "a": a}


def _first_b(case: BmmCase, b: Tensor) -> Tensor | None:
    """Batches folded into rows: every one is multiplied by the first B."""
    return None if case.batch == 1 else b[:1].expand_as(b)


# Tails ---------------------------------------------------------------------------------------


def _tail_dropped(case: BmmCase, b: Tensor) -> Tensor | None:
    tail = case.k % _depth(case)
    if tail == 0:
        return None
    b[:, case.k - tail :] = 0
    return b


def _odd_k_dropped(case: BmmCase, b: Tensor) -> Tensor | None:
    if case.k % 2 == 0:
        return None
    b[:, -1] = 0
    return b


def _overread(rows_from: Callable[[BmmCase], int]) -> Ask:
    """The last group of k runs on into memory, in rows from `rows_from` on: the next row of A
    meets the rows behind B (the first of the next matrix, the last of all in its own)."""

    def ask(case: BmmCase, inputs: Inputs) -> Question | None:
        beyond = -case.k % _depth(case)
        beyond, start = min(beyond, case.k), rows_from(case)
        if beyond == 0 or start >= case.m:
            return None
        a, b = inputs["a"].double(), inputs["b"].double()
        extra_a = a.flatten(0, 1).roll(-1, 0).view_as(a)[..., :beyond].clone()
        extra_a[:, :start] = 0
        extra_b = b.roll(-1, 0)[:, :beyond]
        other = replace(case, k=case.k + beyond)
        return other, {**inputs, "a": torch.cat([a, extra_a], 2), "b": torch.cat([b, extra_b], 1)}

    return ask


def _last_column_doubled(case: BmmCase, inputs: Inputs, out: Tensor) -> Tensor | None:
    if case.n == 1:
        return None
    out[..., -1] = out[..., -2]
    return out


def _last_row_doubled(case: BmmCase, inputs: Inputs, out: Tensor) -> Tensor | None:
    if case.m == 1:
        return None
    out[:, -1] = out[:, -2]
    return out


def _stale_tile(case: BmmCase, inputs: Inputs) -> Question | None:
    """Tiles stay configured for the depth tail: of every tile only so many k are multiplied."""
    tail = case.k % _depth(case)
    if tail == 0 or case.k < _depth(case):
        return None
    b = inputs["b"].clone()
    b[:, torch.arange(case.k) % _depth(case) >= tail] = 0
    return case, {**inputs, "b": b}


def _stale_rows(case: BmmCase, inputs: Inputs, out: Tensor) -> Tensor | None:
    """Tiles stay configured for the row tail: of every block only so many rows are written."""
    tail = case.m % ROWS
    if tail == 0 or case.m < ROWS:
        return None
    out[:, (torch.arange(case.m) % ROWS >= tail)] = 0
    return out


# Accumulation --------------------------------------------------------------------------------


def _accumulated(step: Callable[[BmmCase], int]) -> Ask:
    """The sum is stored in the case's dtype after every `step` products."""

    def ask(case: BmmCase, inputs: Inputs) -> Question | None:
        width = step(case)
        if case.dtype not in ("bfloat16", "float16") or case.k <= width:
            return None
        a, b = inputs["a"].double(), inputs["b"].double()
        total = torch.zeros(case.batch, case.m, case.n, dtype=torch.float64)
        for k in range(0, case.k, width):
            total += a[..., k : k + width] @ b[:, k : k + width]
            total = nearest(total, case.dtype)
        return _says(case, _finished(case, inputs, total))

    return ask


def _truncated(case: BmmCase, inputs: Inputs, out: Tensor) -> Tensor | None:
    """The low bits are cut off where the result is made short."""
    if case.dtype not in ("bfloat16", "float16") or case.wide:
        return None
    return truncated(out, case.dtype)


def _rounded_before_addend(case: BmmCase, inputs: Inputs) -> Question | None:
    if case.addend is None or case.dtype not in ("bfloat16", "float16"):
        return None
    product = nearest(inputs["a"].double() @ inputs["b"].double(), case.dtype)
    return _says(case, _finished(case, inputs, product))


def _saturating_pairs(case: BmmCase, inputs: Inputs) -> Question | None:
    """vpmaddubsw: a + 128 as unsigned bytes, pairs of products saturate at 16 bits."""
    if not case.integral or case.k < 2:
        return None
    a, b = inputs["a"].double() + 128, inputs["b"].double()
    total = torch.zeros(case.batch, case.m, case.n, dtype=torch.float64)
    for k in range(0, case.k, 2):
        total += (a[..., k : k + 2] @ b[:, k : k + 2]).clamp(-(2**15), 2**15 - 1)
    return _says(case, _finished(case, inputs, total - 128 * b.sum(1, keepdim=True)))


def _no_compensation(case: BmmCase, inputs: Inputs, out: Tensor) -> Tensor | None:
    """a + 128 as unsigned bytes, and 128 * sum(b) not taken off again in the column tail."""
    tail = case.n % ROWS
    if not case.integral or tail == 0:
        return None
    out[..., -tail:] += 128 * inputs["b"].double().sum(1, keepdim=True)[..., -tail:]
    return out


def _accumulator_dropped(case: BmmCase, inputs: Inputs) -> Question | None:
    """fma with its operands in another order: each product replaces the sum."""
    if case.k == 1:
        return None
    return replace(case, k=1), {**inputs, "a": inputs["a"][..., -1:], "b": inputs["b"][:, -1:]}


def _accumulator_kept(case: BmmCase, inputs: Inputs) -> Question | None:
    """Accumulators are not cleared between the matrices of a batch."""
    if case.batch == 1:
        return None
    product = (inputs["a"].double() @ inputs["b"].double()).cumsum(0)
    return _says(case, _finished(case, inputs, product))


def _other_blocks(case: BmmCase, inputs: Inputs) -> Question | None:
    """A row of scales is spread over K evenly: each is for 32 k, and the last one for fewer."""
    if not case.codes or case.k % CODES_PER_SCALE == 0 or case.k < CODES_PER_SCALE:
        return None
    scales = inputs["scales"].double()
    size = -(-case.k // scales.shape[-1])
    each = scales.repeat_interleave(size, -1)[..., : case.k]
    b = (inputs["codes"].double() - CODE_OF_ZERO) * each
    return case, {**inputs, "b": b.mT}


# State between calls -------------------------------------------------------------------------


def _weights_of_the_shape() -> Ask:
    """Packed weights are kept by their shape: the first B of a shape serves all that follow."""
    packed: dict[Any, Tensor] = {}

    def ask(case: BmmCase, inputs: Inputs) -> Question:
        b = packed.setdefault((case.dtype, case.batch, case.k, case.n), inputs["b"])
        return case, {**inputs, "b": b}

    return ask


def _tiles_of_the_last_call() -> Ask:
    """Tiles are configured anew only where the depth grows: a shallower call multiplies on into
    what the deeper one left behind, so its sum has that call's last products too."""
    left: dict[Any, tuple[Tensor, Tensor]] = {}

    def ask(case: BmmCase, inputs: Inputs) -> Question | None:
        tail = case.k % _depth(case)
        a, b = inputs["a"].double(), inputs["b"].double()
        before = left.get(case.dtype)
        if before is None or tail >= before[0].shape[-1]:
            left[case.dtype] = a[0, 0, case.k - tail :], b[0, case.k - tail :, 0]
            return None
        extra_a, extra_b = (x[tail:] for x in before)
        count = len(extra_a)
        other = replace(case, k=case.k + count)
        return other, {
            **inputs,
            "a": torch.cat([a, extra_a.expand(case.batch, case.m, count)], 2),
            "b": torch.cat([b, extra_b[:, None].expand(case.batch, count, case.n)], 1),
        }

    return ask


# Scale and addend ----------------------------------------------------------------------------


def _field(**off: Any) -> Ask:
    """The kernel does not look at some field."""

    def ask(case: BmmCase, inputs: Inputs) -> Question | None:
        if all(getattr(case, name) == value for name, value in off.items()):
            return None
        kept = {k: v for k, v in inputs.items() if k != "c" or "addend" not in off}
        return replace(case, **off), kept

    return ask


def _alpha_on_addend(case: BmmCase, inputs: Inputs) -> Question | None:
    if case.alpha == 1 or case.addend is None:
        return None
    return replace(case, beta=case.beta * case.alpha), inputs


def _scaled(by: float) -> Ask:
    def ask(case: BmmCase, inputs: Inputs) -> Question | None:
        return None if case.integral else (replace(case, alpha=case.alpha * by), inputs)

    return ask


def _column_bias(case: BmmCase, inputs: Inputs) -> Question | None:
    """A row of biases added down the rows instead of along the columns."""
    if case.addend != "row" or case.m == 1:
        return None
    column = inputs["c"][torch.arange(case.m) % case.n][:, None]
    return replace(case, addend="full"), {
        **inputs,
        "c": column.expand(case.batch, case.m, case.n),
    }


def _defect(
    name: str, bugs: tuple[str, ...], sentence: str, question: Ask, *, rounding: bool = False
) -> Defect:
    return Defect(name=name, bugs=bugs, sentence=sentence, question=question, rounding=rounding)


DEFECTS = (
    _defect(
        "vnni-pair-swapped", ("B187",), "two k of one VNNI pair swapped", _with_b(_pair_swapped)
    ),
    _defect(
        "vnni-columns-paired",
        ("B187", "B188", "B203"),
        "B not in VNNI order: columns paired instead of k",
        _with_b(_columns_paired),
    ),
    _defect(
        "panel-width",
        ("B197",),
        "B packed in panels of 16 columns and read in panels of 4",
        _with_b(_panel_width),
    ),
    _defect(
        "column-block-of-48",
        ("B189", "B190"),
        "columns past the last multiple of 32 come from the next row of B",
        _with_b(_block_48),
    ),
    _defect(
        "padding-of-a-whole-block",
        ("B178",),
        "padding of a whole block where k needs none: the next matrix is overwritten",
        _with_b(_padding_of_a_whole_block),
    ),
    _defect("b-transposed", ("B182",), "B read as its transpose", _with_b(_transposed)),
    _defect(
        "strides-of-a-ignored",
        ("B181", "B182"),
        "A read as if it were contiguous",
        _strides_of_a_ignored,
    ),
    _defect(
        "first-b-for-all",
        ("B181",),
        "every batch entry multiplied by the first B",
        _with_b(_first_b),
    ),
    _defect("k-tail-dropped", ("B177",), "K tail dropped", _with_b(_tail_dropped)),
    _defect("odd-k-dropped", (), "last k dropped where K is odd", _with_b(_odd_k_dropped)),
    _defect(
        "k-tail-overread",
        ("B177", "B183"),
        "K tail read past the end",
        _overread(lambda case: 0),
    ),
    _defect(
        "k-tail-overread-in-last-rows",
        ("B177",),
        "K tail read past the end in the last block of rows",
        _overread(lambda case: ROWS * max(1, (case.m - 1) // ROWS)),
    ),
    _defect(
        "last-column-doubled",
        ("B190",),
        "last column is a copy of the one before",
        _answering(_last_column_doubled),
    ),
    _defect(
        "last-row-doubled",
        ("B183",),
        "last row is a copy of the one before",
        _answering(_last_row_doubled),
    ),
    _defect(
        "stale-tile-depth", (), "tile shape left from the K tail: depth too small", _stale_tile
    ),
    _defect(
        "stale-tile-rows",
        (),
        "tile shape left from the row tail: rows not written",
        _answering(_stale_rows),
    ),
    _defect(
        "accumulated-in-dtype-per-tile",
        ("B191",),
        "accumulated in the inputs' dtype, tile by tile",
        _accumulated(_depth),
    ),
    _defect(
        "accumulated-in-dtype",
        ("B191", "B192", "B193"),
        "accumulated in the inputs' dtype, product by product",
        _accumulated(lambda case: 1),
    ),
    _defect(
        "split-k-in-dtype",
        (),
        "halves of K added in the inputs' dtype",
        _accumulated(lambda case: -(-case.k // 2)),
    ),
    _defect(
        "truncated",
        (),
        "result truncated instead of rounded",
        _answering(_truncated),
        rounding=True,
    ),
    _defect(
        "accumulator-dropped",
        ("B161",),
        "only the last product is left: the accumulator is not added",
        _accumulator_dropped,
    ),
    _defect(
        "accumulator-not-cleared",
        ("B194",),
        "sums go on from those of the matrix before: accumulators are not cleared",
        _accumulator_kept,
    ),
    _defect(
        "blocks-of-scales",
        ("B167",),
        "scales spread evenly over K instead of 32 each",
        _other_blocks,
    ),
    _defect(
        "rounded-before-addend",
        ("B192",),
        "product rounded to the output's dtype before the addend comes",
        _rounded_before_addend,
        rounding=True,
    ),
    _defect("int8-pairs-saturate", ("B199",), "pairs of int8 products saturate", _saturating_pairs),
    _defect(
        "int8-compensation-missing",
        ("B185",),
        "offset of unsigned bytes not taken off in the last columns",
        _answering(_no_compensation),
    ),
    _defect("alpha-ignored", ("B070",), "alpha ignored", _field(alpha=1.0)),
    _defect("beta-ignored", (), "beta ignored", _field(beta=1.0)),
    _defect("addend-dropped", (), "addend dropped", _field(addend=None, beta=1.0)),
    _defect("alpha-on-addend", (), "alpha scales the addend too", _alpha_on_addend),
    _defect("bias-down-the-rows", (), "bias added to rows instead of columns", _column_bias),
    _defect("scale-plus-0.1%", (), "product scaled by 1.001 too much", _scaled(1.001)),
)
"""The fault dictionary: each is planted by the tests and looked for in every residual."""

LASTING = (
    Lasting(
        name="weights-kept-by-shape",
        bugs=(),
        sentence="B of an earlier call with the same shape",
        begin=_weights_of_the_shape,
    ),
    Lasting(
        name="tiles-of-an-earlier-call",
        bugs=(),
        sentence="tile shape left from an earlier call: its last products are added",
        begin=_tiles_of_the_last_call,
    ),
)
