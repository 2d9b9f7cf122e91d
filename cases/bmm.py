"""Batched matrix product: what can be asked, how it is drawn, and shapes of models and bugs."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from cases import values
from cases.case import Case, Inputs
from cases.drawing import Draw, drawn
from cases.layouts import lay_out
from cases.memory import remembered
from references import bmm as reference

FEATURES = {
    "alpha": "the product is scaled by alpha",
    "addend": "beta * c is added; c is a full matrix per batch entry, or one row (a bias)",
    "beta": "the factor of the addend, 1 if absent (needs addend)",
    "a_layout": "strides of a in memory, with poison in the gaps",
    "b_layout": "strides of b in memory, with poison in the gaps",
    "wide": "the result stays in the accumulator's format, float32 (bfloat16 and float16 only)",
    "codes": "b is given as bytes too, with a power of two per 32 k by which they count",
}
"""Every optional field, with its meaning."""

LAYOUTS = (
    "contiguous",
    "transposed",
    "sliced",
    "interleaved",
    "offset",
    "transposed_sliced",
    "strided",
    "broadcast",
)
"""transposed: columns contiguous; sliced: a window of longer rows; interleaved: the batch axis
lies between rows and columns, as heads do in `[tokens, heads, dim]`; offset: unaligned start;
strided: every second element of each row; broadcast: one matrix for the whole batch (stride 0)."""

REAL_FILLS = (
    "normal",
    "integers",
    "small",
    "loud",
    "cancel",
    "alternating",
    "zeros",
    "subnormal",
    "underflow",
    "constant",
    "outlier",
    "positive",
    "grid",
    "steady",
    "sorted",
)
"""Fills of floating-point cases. integers: the sum is exact in float32, so nothing is allowed."""
INT8_FILLS = ("range", "integers", "extreme")
"""Fills of int8 cases: all 256 values; -8..8; only -128 and 127."""
INDEX_PROBE = "index_probe"
"""A fill that `cases.probes` reads back: row i of a in batch entry e is unit vector (i + e) mod k,
and each element of b is a whole number that tells it from its neighbours: see `names`."""
NAMES = 251
"""How many names there are: a prime, so that neither a row nor a column nor a tile wraps onto the
same one. They are -125..126 without 0, which every dtype holds exactly."""
SMALL_INTEGERS = 8
"""Bound of the `integers` fill: sums of K < 2**18 products stay exact in float32's 24 bits."""

CODES_PER_SCALE = 32
CODE_OF_ZERO = 128

TILES = (2, 4, 8, 16, 32, 48, 64, 128)
"""Sizes at whose neighbours a packed kernel has tails: VNNI groups, tile rows, depths, blocks."""
DTYPES = ("float32", "bfloat16", "float16", "int8")


@dataclass(frozen=True, kw_only=True)
class BmmCase(Case):
    """a [batch, m, k] times b [batch, k, n], and perhaps c.

    Raises:
        ValueError: fields that contradict each other.
    """

    op: ClassVar[str] = "bmm"
    values: str
    batch: int
    m: int
    n: int
    k: int
    alpha: float = 1.0
    addend: str | None = None
    beta: float = 1.0
    a_layout: str = "contiguous"
    b_layout: str = "contiguous"
    wide: bool = False
    codes: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"{what}; got {self.to_json()}")

        need(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}")
        fills = (*(INT8_FILLS if self.integral else REAL_FILLS), INDEX_PROBE)
        need(self.values in fills, f"values must be one of {', '.join(fills)}")
        need(min(self.batch, self.m, self.n, self.k) >= 1, "batch, m, n and k must be at least 1")
        finite = math.isfinite(self.alpha) and math.isfinite(self.beta)
        need(finite, "alpha and beta must be finite")
        need(self.addend in (None, "full", "row"), "addend must be full or row")
        need(self.beta == 1 or self.addend is not None, "beta needs addend")
        for layout in (self.a_layout, self.b_layout):
            need(layout in LAYOUTS, f"layouts must be among {', '.join(LAYOUTS)}")
        scaled = self.alpha != 1 or self.beta != 1
        need(not (self.integral and scaled), "int8 has no alpha or beta")
        need(not self.integral or self.k < 2**17, "int8 needs k < 2**17, or int32 overflows")
        need(not (self.integral and self.codes), "int8 needs no codes")
        need(not self.wide or self.dtype in ("bfloat16", "float16"), "wide needs a 16-bit dtype")

    @property
    def integral(self) -> bool:
        return self.dtype == "int8"

    @property
    def structured(self) -> bool:
        return self.values not in {"range", *values.INDEPENDENT}

    @property
    def work(self) -> int:
        return self.batch * self.m * self.n * self.k

    @property
    def tail(self) -> bool:
        """Some size is no multiple of an AMX tile's."""
        depth = 64 if self.integral else 32
        return bool(self.m % 16 or self.n % 16 or self.k % depth)

    def output_dtypes(self) -> Mapping[str, str]:
        return {"out": "int32" if self.integral else "float32" if self.wide else self.dtype}

    def output_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"out": (self.batch, self.m, self.n)}

    def axes(self) -> Mapping[str, tuple[str, ...]]:
        return {"out": ("batch", "row", "column")}

    def inputs(self) -> Inputs:
        return dict(_inputs(self))

    def expected(self, inputs: Inputs) -> Inputs:
        return {
            "out": reference.bmm(
                inputs["a"], inputs["b"], alpha=self.alpha, c=inputs.get("c"), beta=self.beta
            )
        }

    def vacuous(self, inputs: Inputs) -> str | None:
        if self.batch == 1 and "broadcast" in (self.a_layout, self.b_layout):
            return "broadcast: a batch of one"
        for name, off in (("alpha", 1.0), ("beta", 1.0), ("addend", None)):
            if name in self.features() and self._unseen(inputs, name, off):
                return f"{name}={getattr(self, name)}: the output rounds to the same bits without"
        return None

    def _unseen(self, inputs: Inputs, name: str, off: Any) -> bool:
        change: dict[str, Any] = {name: off, **({"beta": 1.0} if name == "addend" else {})}
        kept = {k: v for k, v in inputs.items() if k != "c" or name != "addend"}
        dtype = getattr(torch, self.output_dtypes()["out"])
        with_, without = self.expected(inputs), replace(self, **change).expected(kept)
        return torch.equal(with_["out"].to(dtype), without["out"].to(dtype))


@remembered
def _inputs(case: BmmCase) -> tuple[tuple[str, torch.Tensor], ...]:
    whole = case.integral or case.values in ("integers", INDEX_PROBE)
    a, b = _integers(case) if whole else _reals(case)
    out = {}
    if case.codes:
        out["codes"], scales, b = _codes(case)
        out["scales"] = values.cast(scales, case.dtype)
    bad = 77.0 if case.integral else values.poison(case.dtype)
    dtype = getattr(torch, case.dtype)
    for name, x, layout in (("a", a, case.a_layout), ("b", b, case.b_layout)):
        typed = x.to(dtype) if case.integral else values.cast(x, case.dtype)
        out[name] = _lay_out(typed, layout, bad)
    if case.addend is not None:
        shape = (case.n,) if case.addend == "row" else (case.batch, case.m, case.n)
        if case.integral:
            out["c"] = values.integers(case.seed, "c", shape, -(2**20), 2**20).to(torch.int32)
        else:
            out["c"] = values.cast(_addend(case, shape), case.dtype)
    return tuple(out.items())


def _lay_out(x: torch.Tensor, layout: str, poison: float) -> torch.Tensor:
    """`x` [batch, rows, columns] under the strides of `layout`."""
    match layout:
        case "transposed":
            return lay_out(x, "swapped", poison)
        case "transposed_sliced":
            return lay_out(x.mT, "sliced", poison).mT
        case "interleaved":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        case "strided":
            wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), poison).to(x.dtype)
            wide[..., ::2] = x
            return wide[..., ::2]
        case "broadcast":
            return x[:1].contiguous().expand_as(x)
    return lay_out(x, layout, poison)


def _integers(case: BmmCase) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b as whole numbers, of the fill that the case names."""
    if case.values == INDEX_PROBE:
        return probing_rows(case), names(case)
    shapes = (("a", (case.batch, case.m, case.k)), ("b", (case.batch, case.k, case.n)))
    if case.values == "extreme":
        a, b = (values.integers(case.seed, name, shape, 0, 1) * 255 - 128 for name, shape in shapes)
    else:
        top = 127 if case.values == "range" else SMALL_INTEGERS
        low = -128 if case.values == "range" else -top
        a, b = (values.integers(case.seed, name, shape, low, top) for name, shape in shapes)
    return a.double(), b.double()


def probing_rows(case: BmmCase) -> torch.Tensor:
    """a of an index probe: row i of batch entry e picks row (i + e) mod k of b."""
    entry, row = torch.arange(case.batch)[:, None], torch.arange(case.m)
    return torch.nn.functional.one_hot((row + entry) % case.k, case.k).double()


def names(case: BmmCase) -> torch.Tensor:
    """b of an index probe: every element's name, in the order of a contiguous b."""
    code = torch.arange(case.batch * case.k * case.n) % NAMES - NAMES // 2
    return torch.where(code >= 0, code + 1, code).double().view(case.batch, case.k, case.n)


def _codes(case: BmmCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [batch, n, k], scales [batch, n, ceil(k / 32)], and b = scale * (code - 128).

    Eight bits times a power of two: every dtype holds b exactly.
    """
    whole = case.values in ("integers", INDEX_PROBE)
    reach = SMALL_INTEGERS if whole else CODE_OF_ZERO
    shape = (case.batch, case.n, case.k)
    codes = CODE_OF_ZERO + values.integers(case.seed, "codes", shape, -reach, min(reach, 127))
    if case.values == INDEX_PROBE:
        codes = CODE_OF_ZERO + names(case).mT.long()
    groups = (case.batch, case.n, -(-case.k // CODES_PER_SCALE))
    down = values.integers(case.seed, "scales", groups, 3, 6)
    scales = torch.ldexp(torch.ones(groups).double(), -down) if not whole else torch.ones(groups)
    each = scales.repeat_interleave(CODES_PER_SCALE, -1)[..., : case.k]
    return codes.to(torch.uint8), scales, ((codes - CODE_OF_ZERO) * each).double().mT


def _addend(case: BmmCase, shape: tuple[int, ...]) -> torch.Tensor:
    """c as float64, of about the size of the product where that is not tiny."""
    if case.values in ("integers", INDEX_PROBE):
        return values.integers(case.seed, "c", shape, -64, 64).double()
    c = values.normal(case.seed, "c", shape)
    return c * values.tiny(case.dtype) if case.values in ("subnormal", "underflow") else c


def _reals(case: BmmCase) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b as float64, of the fill that the case names."""
    a = values.normal(case.seed, "a", (case.batch, case.m, case.k))
    b = values.normal(case.seed, "b", (case.batch, case.k, case.n))
    half = case.k // 2
    match case.values:
        case "small":
            a, b = a / 64, b / 256
        case "loud":
            a, b = a * 16, b * 4
        case "cancel":  # the halves of every sum nearly cancel
            jitter = values.normal(case.seed, "jitter", (case.batch, half, case.n))
            a[..., half : 2 * half] = -a[..., :half]
            b[:, half : 2 * half] = b[:, :half] * (1 + jitter / 1024)
        case "alternating":  # neighbouring terms cancel: interleaved chains grow
            a = a.abs() * (1.0 - 2.0 * (torch.arange(case.k) % 2))
            b = b.abs()
        case "zeros":
            a[..., ::2] = 0
            b[..., : case.n // 2] = 0
        case "subnormal":  # factors among the subnormals, and their sums
            a = a * values.tiny(case.dtype)
        case "underflow":  # normal factors, products about the smallest normal of the result
            down = 2.0**-9 if case.dtype == "float16" else 2.0**-63
            a, b = a * down, b * (down / 2)
        case "constant":
            a, b = torch.full_like(a, 0.1), torch.full_like(b, 0.7)
        case "outlier":
            a[..., 1 % case.k] *= 128
            b[:, -1] *= 64
        case "positive":
            a, b = a.abs(), b.abs()
        case "grid":  # few bits: sums are exact
            a, b = (a * 2).round() / 2, (b * 2).round() / 2
        case "steady":
            b = 1 + b / 128
        case "sorted":  # the partial sums grow far beyond the result
            b = b.abs() * torch.where(torch.arange(case.k)[:, None] < half, 1.0, -1.0)
            a = a.abs()
    return a, b


class Claims(frozenset[str]):
    """Features that a subject supports. multiple: of which its n and k must be.

    Equal only to claims that draw the same cases.
    """

    multiple: int

    def __new__(cls, names: Iterable[str], *, multiple: int) -> Self:
        self = super().__new__(cls, names)
        self.multiple = multiple
        return self

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and vars(self) == getattr(other, "__dict__", {})

    def __hash__(self) -> int:
        return hash((frozenset(self), self.multiple))

    def lacking(self, case: BmmCase) -> str | None:
        """The refusal of a case of other sizes, or None."""
        if case.n % self.multiple or case.k % self.multiple:
            return f"n={case.n} and k={case.k} must be multiples of {self.multiple}"
        return None


@drawn
def strategy(
    draw: Draw, claims: frozenset[str], dtypes: tuple[str, ...], large: bool = False
) -> BmmCase:
    """Cases that use only claimed features; shrinks towards few, small and featureless.

    claims: names from FEATURES; `Claims` for the sizes too. large: nightly sizes, in an eighth of
    the draws (up to 4096 along one axis). A subject that claims codes can't do without: they are
    always there.
    """
    large = large and draw.rarely()
    dtype = draw.among(*dtypes)
    on = draw.subset(claims - {"codes"}, FEATURES) | (claims & {"codes"})
    on -= {"codes"} if dtype == "int8" else frozenset()
    on -= {"alpha", "beta"} if dtype == "int8" else frozenset()
    on -= {"wide"} if dtype in ("int8", "float32") else frozenset()
    on |= {"addend"} if "beta" in on else frozenset()
    layouts = {name: draw.among(*LAYOUTS[1:]) for name in ("a_layout", "b_layout") if name in on}
    batch = draw.between(2 if "broadcast" in layouts.values() else 1, 3)
    m, n, k = _sizes(draw, batch, (1 << 24) if large else (1 << 19), 4096 if large else 1100)
    whole = getattr(claims, "multiple", 1)
    n, k = (-(-size // whole) * whole for size in (n, k))
    fills = INT8_FILLS if dtype == "int8" else REAL_FILLS
    return BmmCase(
        dtype=dtype,
        seed=draw.seed(),
        values=draw.mostly(fills[0], fills),
        batch=batch,
        m=m,
        n=n,
        k=k,
        alpha=draw.among(2.0, 0.125, -1.5, 0.3) if "alpha" in on else 1.0,
        addend=draw.among("row", "full") if "addend" in on else None,
        beta=draw.among(-1.0, 0.5, 0.3) if "beta" in on else 1.0,
        wide="wide" in on,
        codes="codes" in on,
        **layouts,
    )


def _sizes(draw: Draw, batch: int, work: int, longest: int) -> tuple[int, int, int]:
    """m, n and k whose product with the batch is at most `work`, in any order of size."""
    sizes, left = {}, work // batch
    for name in draw.among(*itertools.permutations(("k", "n", "m"))):
        high = min(longest, left)
        size = draw.near(*TILES, low=1, high=high if draw.either() else min(high, 130))
        sizes[name], left = size, left // size
    return sizes["m"], sizes["n"], sizes["k"]


CASE = BmmCase


def _pinned(**fields: Any) -> BmmCase:
    return BmmCase(**{"dtype": "bfloat16", "seed": 1, "values": "normal", "batch": 1, **fields})


PINNED: tuple[tuple[str, BmmCase], ...] = (
    # DeepSeek's 128 heads, 16 on each of 8 ranks: q_nope [tokens, heads, 128] into the 512 latents,
    # and the latents' average back into the 128 columns of v.
    ("deepseek-v3-absorb-q-tp8", _pinned(batch=16, m=1, k=128, n=512, a_layout="interleaved")),
    ("deepseek-v3-absorb-v-tp8", _pinned(batch=16, m=2, k=512, n=128, a_layout="interleaved")),
    (
        "deepseek-v2-lite-absorb-q-stepwise",
        _pinned(batch=16, m=3, k=128, n=512, a_layout="interleaved", b_layout="transposed"),
    ),
    ("deepseek-v3-kv-b-plain", _pinned(m=5, k=512, n=257, b_layout="transposed")),
    ("gpt-oss-router", _pinned(m=7, k=2880, n=32, b_layout="transposed", addend="row")),
    ("gpt-oss-expert-bias", _pinned(batch=4, m=2, k=720, n=180, addend="row")),
    # Shapes at which real kernels were wrong (bugs.json).
    ("B178-depth-of-whole-blocks", _pinned(m=8, k=2664, n=256)),
    ("B181-batch-folded-into-rows", _pinned(batch=2, m=8, k=2, n=8, b_layout="broadcast")),
    ("B182-unit-sizes", _pinned(batch=3, m=2, k=3, n=3, a_layout="interleaved",
                                b_layout="interleaved")),
    ("B183-depth-tail", _pinned(m=64, k=576, n=64)),
    ("B183-one-row", _pinned(batch=3, m=1, k=65, n=17, b_layout="transposed")),
    ("B189-block-of-48", _pinned(m=17, k=1024, n=48)),
    ("B190-columns-65", _pinned(dtype="float16", m=4, k=144, n=65)),
    ("B191-ones-1024", _pinned(m=3, k=1024, n=5, values="constant")),
    ("B192-gemv-with-beta", _pinned(m=1, k=10, n=33, addend="full", beta=0.5)),
    ("B193-large-sums", _pinned(dtype="float16", m=2, k=700, n=9, values="positive")),
    ("B199-int8-extreme", _pinned(dtype="int8", m=17, k=130, n=33, values="extreme")),
    ("exact-integers-odd-depth", _pinned(m=33, k=2047, n=31, values="integers", wide=True)),
    ("products-underflow", _pinned(m=4, k=33, n=17, values="underflow", wide=True)),
)  # fmt: skip
"""Matrix products of published models, and the shapes of real bugs, by name."""
