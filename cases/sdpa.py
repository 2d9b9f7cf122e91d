"""Scaled dot-product attention: what can be asked, how it is drawn, and shapes of real models."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import torch

from cases import values
from cases.case import Case, Inputs
from cases.drawing import Draw, drawn
from cases.layouts import NAMES as LAYOUTS
from cases.layouts import lay_out
from cases.memory import remembered
from cases.probes.weights import ladder, rung
from references import sdpa as reference

T = TypeVar("T")

FEATURES = {
    "causal": "query i sees keys up to its own position; last query aligned with last key",
    "window": "each query sees at most `window` keys, itself included (needs causal)",
    "sinks": "one more key per head with a logit of its own and value 0; mean logit",
    "softcap": "scores pass through softcap * tanh(score / softcap)",
    "scale": "softmax scale other than 1/sqrt(head_dim)",
    "kv_lens": "valid keys per request; the rest is padding and poisoned",
    "q_lens": "valid queries per request (ragged batch)",
    "side": "where padding stands: right (default) or left",
    "layout": "strides of q, k and v in memory, with poison in the gaps",
    "lse": "the log of the softmax denominator is returned too (natural log)",
    "schedule": "queries per call: prefill chunks and decode steps over a growing key cache",
    "page_size": "keys lie in pages of so many, out of order, with foreign pages between",
    "poison": "nan: what must not be read holds NaN instead of a large finite number",
    "alibi": "slope of the head * distance of the key comes off the score; -log2 of the last slope",
}
"""Every optional field, with its meaning."""

DTYPES = ("float32", "bfloat16", "float16")
WINDOWS = (1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 128)
LARGEST_WORK = 1 << 26
"""Multiplications of q and k, per request, of a nightly case."""
PER_QUERY = ("q", "visible", "distance")
"""Inputs of which the last axis but one is the query."""
PAGES = (16, 32, 64, 1)
CAPS = {"float32": (2.0, 20.0, 50.0), "bfloat16": (2.0, 5.0, 10.0), "float16": (2.0, 5.0, 10.0)}
"""Softcaps that are drawn: in 16 bits, 50 (which Gemma 2 has) leaves most scores as they are."""
BLOCKS = (8, 16, 32, 64, 128, 256, 512)
PROBES = ("mask_probe", "key_probe")
"""Fills that `cases.probes` reads back: row j of v is a multiple of unit vector j, a different one
for each request and kv head. mask_probe: q is 0, all visible keys weigh alike; key_probe: row j of
k is unit vector j, and the queries give the keys a ladder of logits."""


@dataclass(frozen=True, kw_only=True)
class SdpaCase(Case):
    """q [batch, heads, q_len, head_dim] against k and v [batch, kv_heads, kv_len, head_dim].

    Lengths are those of the tensors; `q_lens` and `kv_lens` say how much of them is valid.
    Lengths in positions; `scale`, `softcap` and `sinks` in logits. With `page_size` there is a
    `table` int32 [batch, n] too: the page of each run of so many valid keys, in order, and then a
    page that belongs to nobody, as does every page that it does not name. With `alibi` there are
    `alibi` float32 [heads], the published slopes down to 2^-alibi, and `distance` int32
    [batch, 1, q_len, kv_len], the query's position in its request minus the key's.

    Raises:
        ValueError: fields that contradict each other.
    """

    op: ClassVar[str] = "sdpa"
    values: str
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None
    sinks: float | None = None
    softcap: float | None = None
    scale: float | None = None
    kv_lens: tuple[int, ...] | None = None
    q_lens: tuple[int, ...] | None = None
    side: str = "right"
    layout: str = "contiguous"
    lse: bool = False
    schedule: tuple[int, ...] = ()
    page_size: int | None = None
    poison: str = "finite"
    alibi: float | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"{what}; got {self.to_json()}")

        fills = (*values.NAMES, *PROBES)
        need(self.values in fills, f"values must be one of {', '.join(fills)}")
        sizes = (self.batch, self.q_len, self.kv_len, self.heads, self.kv_heads, self.head_dim)
        need(min(sizes) >= 1, "batch, lengths, heads and head_dim must be at least 1")
        need(self.heads % self.kv_heads == 0, "heads must be a multiple of kv_heads")
        need(self.window is None or self.causal, "window needs causal")
        need(self.window is None or self.window >= 1, "window must be at least 1")
        need(self.side in ("right", "left"), "side must be right or left")
        need(self.page_size is None or self.page_size >= 1, "page_size must be at least 1")
        for name in ("scale", "softcap", "alibi"):
            x = getattr(self, name)
            need(x is None or (x > 0 and math.isfinite(x)), f"{name} must be positive and finite")
        room = torch.finfo(getattr(torch, self.dtype)).max / 2 if self.sinks is not None else 0
        need(abs(self.sinks or 0) <= room, f"sinks must be at most half the largest {self.dtype}")
        need(self.poison in ("finite", "nan"), "poison must be finite or nan")
        for lens, top in ((self.kv_lens, self.kv_len), (self.q_lens, self.q_len)):
            need(
                lens is None or (len(lens) == self.batch and 0 <= min(lens) <= max(lens) <= top),
                "kv_lens and q_lens must give each request a length within the tensor",
            )
        if self.schedule:
            need(sum(self.schedule) == self.q_len, "schedule must add up to q_len")
            need(min(self.schedule) >= 1, "schedule steps must be at least 1")
            need(self.causal and self.kv_len >= self.q_len, "schedule needs causal, kv >= q")
            need(self.kv_lens is None and self.q_lens is None, "schedule excludes padding")

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def structured(self) -> bool:
        return self.values not in values.INDEPENDENT

    @property
    def dead_rows(self) -> bool:
        """Some query that is asked for sees no key."""
        return any(q and (k == 0 or (self.causal and q > k)) for q, k in self._requests())

    @property
    def padded_keys(self) -> bool:
        """Some keys are padding, hence poisoned."""
        return self.kv_lens is not None and min(self.kv_lens) < self.kv_len

    @property
    def more_queries(self) -> bool:
        """A request has more queries than keys, so they can't all be its newest tokens."""
        return any(q > k for q, k in self._requests())

    @property
    def bad(self) -> float:
        """What stands where nothing must be read."""
        return math.nan if self.poison == "nan" else values.poison(self.dtype)

    @property
    def first_keys(self) -> tuple[int, ...]:
        """Where the valid keys of each request begin in its row."""
        lens = self._lens()[1]
        return tuple(self.kv_len - n if self.side == "left" else 0 for n in lens)

    @property
    def pages(self) -> int:
        """Pages of the whole cache, foreign ones included."""
        assert self.page_size is not None
        return sum(-(-k // self.page_size) for k in self._lens()[1]) + SPARE

    @property
    def work(self) -> int:
        return self.batch * self.heads * self.q_len * self.kv_len * self.head_dim

    def output_dtypes(self) -> Mapping[str, str]:
        return {"out": self.dtype, **({"lse": "float32"} if self.lse else {})}

    def output_shapes(self) -> Mapping[str, tuple[int, ...]]:
        rows = (self.batch, self.heads, self.q_len)
        return {"out": (*rows, self.head_dim), **({"lse": rows} if self.lse else {})}

    def axes(self) -> Mapping[str, tuple[str, ...]]:
        rows = ("request", "head", "query row")
        return {"out": (*rows, "column"), "lse": rows}

    def place(self, output: str, where: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        named = super().place(output, where)
        if self.schedule:
            ends = torch.tensor([end for _, end, _ in self.steps()])
            named["call"] = torch.bucketize(named["query row"], ends, right=True)
        return named

    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """(first query, end of queries, keys) of every call of the schedule."""
        out, start = [], 0
        for step in self.schedule or (self.q_len,):
            out.append((start, start + step, self.kv_len - self.q_len + start + step))
            start += step
        return tuple(out)

    def inputs(self) -> Inputs:
        return dict(_inputs(self))

    def expected(self, inputs: Inputs) -> Inputs:
        out, lse = reference.sdpa(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            visible=inputs["visible"],
            scale=self.softmax_scale,
            softcap=self.softcap,
            sinks=inputs.get("sinks"),
            **({} if self.alibi is None else {n: inputs[n] for n in ("alibi", "distance")}),
        )
        return {"out": out, **({"lse": lse} if self.lse else {})}

    def judged(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        if self.q_lens is None:
            return {}
        return self._per_output(self._rows())

    def dead(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        dead = ~inputs["visible"][:, 0].any(-1) & self._rows()
        return self._per_output(dead) if bool(dead.any()) else {}

    def vacuous(self, inputs: Inputs) -> str | None:
        on, requests = self.features(), self._requests()
        if self.window is not None:
            farthest = max((k for q, k in requests if q), default=0) - 1  # from a last query
            if farthest < max(self.window - 1, 1):
                return f"window={self.window}: no key is clipped, nor by one less"
        plain = "causal" in on and self.window is None and self.kv_len == self.q_len
        if plain and all(q < 2 or k == 0 for q, k in requests):
            return "causal: no key is hidden"
        if "kv_lens" in on and self.kv_lens and min(self.kv_lens) == self.kv_len:
            return "kv_lens: no key is padding"
        if "q_lens" in on and self.q_lens and min(self.q_lens) == self.q_len:
            return "q_lens: no query is padding"
        if "side" in on and self.kv_lens is None and self.q_lens is None:
            return "side: nothing is padded"
        if "schedule" in on and len(self.schedule) == 1:
            return "schedule: a single step"
        if "poison" in on and not ({"kv_lens", "page_size"} & on or self.layout != LAYOUTS[0]):
            return "poison: there is nothing that must not be read"
        if not any(q and k for q, k in requests):
            return "no key is visible to any query"
        for name in self._unseen(inputs, [n for n in ("sinks", "softcap", "alibi") if n in on]):
            return f"{name}={getattr(self, name)}: the output rounds to the same bits without"
        return None

    def _unseen(self, inputs: Inputs, names: list[str]) -> list[str]:
        """The features without which every output has the same bits."""
        dtype = getattr(torch, self.dtype)
        for some in self._glances(inputs) if names else ():
            right = self.expected(some)

            def hidden(name: str, some: Inputs = some, right: Inputs = right) -> bool:
                off: dict[str, Any] = {name: None}
                left = {k: x for k, x in some.items() if k != name}
                without = replace(self, **off).expected(left)
                return all(torch.equal(x.to(dtype), without[k].to(dtype)) for k, x in right.items())

            names = list(filter(hidden, names))
            if not names:
                break
        return names

    def _glances(self, inputs: Inputs) -> Iterator[Inputs]:
        """More and more of the attention: mostly little of it shows what is looked for.

        The last query on the first kv head of the last request, the last query, everything.
        """
        last = {k: x[..., -1:, :] if k in PER_QUERY else x for k, x in inputs.items()}
        group = self.heads // self.kv_heads
        heads = {"q": group, "k": 1, "v": 1}
        one = {k: x[-1:, : heads[k]] if k in heads else x for k, x in last.items()}
        one |= {k: last[k][-1:] for k in ("visible", "distance") if k in last}
        one |= {k: last[k][:group] for k in ("sinks", "alibi") if k in last}
        yield from (one, last, inputs)

    def _lens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (
            self.q_lens or (self.q_len,) * self.batch,
            self.kv_lens or (self.kv_len,) * self.batch,
        )

    def _requests(self) -> list[tuple[int, int]]:
        """(queries, keys) of each request, padding not counted."""
        return list(zip(*self._lens(), strict=True))

    def _visible(self) -> torch.Tensor:
        """bool [batch, q_len, kv_len]."""
        q_lens, kv_lens = self._lens()
        return reference.visible_keys(
            q_lens,
            kv_lens,
            self.q_len,
            self.kv_len,
            causal=self.causal,
            window=self.window,
            side=self.side,
        )

    def _distances(self) -> torch.Tensor:
        """int64 [batch, q_len, kv_len]."""
        return reference.distances(*self._lens(), self.q_len, self.kv_len, side=self.side)

    def _rows(self) -> torch.Tensor:
        """bool [batch, q_len]: the queries that are not padding."""
        return valid_slots(self._lens()[0], self.q_len, self.side)

    def _per_output(self, rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
        rows = rows[:, None].expand(self.batch, self.heads, self.q_len)
        wide = rows[..., None].expand(*rows.shape, self.head_dim)
        return {"out": wide, **({"lse": rows} if self.lse else {})}


def valid_slots(lens: tuple[int, ...], length: int, side: str) -> torch.Tensor:
    """bool [batch, length]: the slots that are not padding."""
    slot, lens_ = torch.arange(length)[None], torch.tensor(lens)[:, None]
    return slot < lens_ if side == "right" else slot >= length - lens_


@remembered
def _inputs(case: SdpaCase) -> tuple[tuple[str, torch.Tensor], ...]:
    q, k, v = (values.cast(x, case.dtype) for x in _filled(case))
    bad = case.bad
    q_lens, kv_lens = case._lens()
    if case.kv_lens is not None:
        padded = ~valid_slots(kv_lens, case.kv_len, case.side)[:, None, :, None]
        k, v = k.masked_fill(padded, bad), v.masked_fill(padded, bad)
    if case.q_lens is not None:
        q = q.masked_fill(~valid_slots(q_lens, case.q_len, case.side)[:, None, :, None], 1.0)
    laid = (lay_out(x, case.layout, bad) for x in (q, k, v))
    out = dict(zip("qkv", laid, strict=True))
    out["visible"] = case._visible()[:, None]
    if case.sinks is not None:
        spread = values.normal(case.seed, "sinks", (case.heads,)) * 0.5
        out["sinks"] = values.cast(spread + case.sinks, case.dtype)
    if case.page_size is not None:
        out["table"] = _table(case)
    if case.alibi is not None:
        out["alibi"] = reference.alibi_slopes(case.heads, case.alibi).float()
        out["distance"] = case._distances()[:, None].int()
    return tuple(out.items())


SPARE = 2
"""Pages that no request has, all poison."""


def _table(case: SdpaCase) -> torch.Tensor:
    """The pages of each request, never all in their natural order."""
    pages = case.pages
    order = torch.from_numpy(values.words(case.seed, "pages", pages).argsort(kind="stable").copy())
    counts = [-(-k // (case.page_size or 1)) for k in case._lens()[1]]
    if torch.equal(order[: sum(counts)], torch.arange(sum(counts))):
        order = order.roll(1)
    table = torch.full((case.batch, max(counts) + 1), int(order[-1]), dtype=torch.int32)
    for request, mine in enumerate(order[: sum(counts)].split(counts)):
        table[request, : len(mine)] = mine
    return table


def _filled(case: SdpaCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as float64, of the fill that the case names."""
    b, d = case.batch, case.head_dim
    q = values.normal(case.seed, "q", (b, case.heads, case.q_len, d))
    k = values.normal(case.seed, "k", (b, case.kv_heads, case.kv_len, d))
    v = values.normal(case.seed, "v", (b, case.kv_heads, case.kv_len, d))
    half = d // 2
    match case.values:
        case "small":
            q, k, v = q / 16, k / 16, v / 128
        case "loud":
            q, k = q * 4, k * 4
        case "peaked":  # one key lies along the first query
            j = int(values.integers(case.seed, "peak", (1,), 0, case.kv_len - 1))
            k[:, :, j] = q[:, : case.kv_heads, 0] * 3
            v = v * 4
        case "flat":
            q = q / 64
        case "cancel":  # halves of every dot product nearly cancel
            q[..., half : 2 * half] = -q[..., :half]
            jitter = values.normal(case.seed, "jitter", (b, case.kv_heads, case.kv_len, half))
            k[..., half : 2 * half] = k[..., :half] * (1 + jitter / 1024)
            q = q * 4
        case "alternating":  # neighbouring values cancel
            sign = 1.0 - 2.0 * (torch.arange(case.kv_len) % 2)[:, None]
            q, v = q / 8, v.abs() * sign
        case "zeros":
            q[..., ::2] = 0
            k[:, :, : case.kv_len // 2] = 0
            v[:, :, case.kv_len // 3 :: 2] = 0
        case "subnormal":
            v = v * values.tiny(case.dtype)
        case "constant":
            q, k, v = (torch.full_like(x, c) for x, c in ((q, 0.1), (k, 0.7), (v, 1.3)))
        case "outlier":  # two loud channels, as in real checkpoints
            q[..., 1 % d] *= 32
            k[..., 3 % d] *= 16
            v[..., 0] *= 64
        case "positive":
            q, k, v = q.abs(), k.abs(), v.abs()
        case "grid":  # few bits: sums are exact
            q, k, v = (q * 2).round() / 2, (k * 2).round() / 2, (v * 4).round() / 4
        case "steady":
            v = 1 + v / 128
        case "mask_probe":
            q, v = torch.zeros_like(q), _named(case)
        case "key_probe":
            row, column = torch.arange(case.q_len)[:, None], torch.arange(d)
            head = torch.arange(case.heads)[:, None, None]
            q = q.zero_() + ladder(rung(case.softmax_scale), head, row, column)
            k, v = k.zero_() + torch.eye(case.kv_len, d).double(), _named(case)
    return q, k, v


def _named(case: SdpaCase) -> torch.Tensor:
    """Values that tell their key by the column, and their request and kv head by the size."""
    names = torch.eye(case.kv_len, case.head_dim).double()
    owners = 1 + torch.arange(case.batch * case.kv_heads).double()
    return owners.view(case.batch, case.kv_heads, 1, 1) * names


_DIMS = (8, 16, 32, 64, 80, 96, 128)
_LARGE_SHAPES = tuple(itertools.product((1, 2, 3, 8), (1, 2, 5, 8), (*_DIMS, 256)))
"""(kv_heads, query heads per kv head, head_dim), smallest first."""


class Claims(frozenset[str]):
    """Features that a subject supports, with the sizes that it has kernels for.

    head_dims, pages: drawn from these. cached: queries are the newest of a request's tokens, so
    none has more queries than keys. Equal only to claims that draw the same cases.
    """

    head_dims: tuple[int, ...]
    pages: tuple[int, ...]
    cached: bool

    def __new__(
        cls,
        names: Iterable[str],
        *,
        head_dims: tuple[int, ...],
        pages: tuple[int, ...] = PAGES,
        cached: bool = False,
    ) -> Self:
        self = super().__new__(cls, names)
        self.head_dims, self.pages, self.cached = head_dims, pages, cached
        return self

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and vars(self) == getattr(other, "__dict__", {})

    def __hash__(self) -> int:
        return hash((frozenset(self), self.head_dims, self.pages, self.cached))

    def lacking(self, case: SdpaCase) -> str | None:
        """The refusal of a case of other sizes, or None."""
        if case.head_dim not in self.head_dims:
            return f"head_dim {case.head_dim}: there is no kernel for it"
        if case.page_size is not None and case.page_size not in self.pages:
            return f"page_size {case.page_size} is not supported"
        if self.cached and case.more_queries:
            return "a request has more queries than keys"
        return None


@drawn
def strategy(
    draw: Draw, claims: frozenset[str], dtypes: tuple[str, ...], large: bool = False
) -> SdpaCase:
    """Cases that use only claimed features; shrinks towards few, small and featureless.

    Draws are arranged so that each feature that is on can be seen in the output.

    claims: names from FEATURES; `Claims` for the sizes too. large: nightly sizes, in an eighth of
    the draws (kv_len to 4096, head_dim to 256).
    """
    large = large and draw.rarely()
    on = draw.subset(claims, FEATURES)
    on |= {"causal"} if on & {"window", "schedule"} else frozenset()
    on -= {"schedule"} if on & {"kv_lens", "q_lens"} else frozenset()

    def value(name: str, *options: T) -> T | None:
        """Of a feature that is on; drawn if it is off, too, which keeps all that follows."""
        found = draw.among(*options) if name in claims else None
        return found if name in on else None

    dtype, seed, fill = draw.among(*dtypes), draw.seed(), draw.mostly("normal", values.NAMES[1:])
    window = value("window", *WINDOWS)
    sinks, softcap = value("sinks", 0.0, -4.0, 4.0), value("softcap", *CAPS[dtype])
    scale, alibi = value("scale", 1.0, 0.0625, 0.3), value("alibi", 8.0, 4.0)
    layout = value("layout", *LAYOUTS[1:]) or LAYOUTS[0]
    page_size = value("page_size", *getattr(claims, "pages", PAGES))
    poison = "nan" if "poison" in claims and draw.rarely() else "finite"
    least = 2 if softcap or alibi else 1  # keys: one alone has all the weight, whatever its score
    window = max(window, least) if window else None
    plain, scheduled = "window" not in claims, "schedule" in on
    q_len, kv_len = _lengths(draw, window, least, scheduled=scheduled, plain=plain, large=large)
    kv_heads, group, head_dim = _shape(draw, getattr(claims, "head_dims", _DIMS))
    if large:
        kv_heads, group, head_dim = _large_shape(draw, q_len * kv_len)
        head_dim = draw.among(*claims.head_dims) if isinstance(claims, Claims) else head_dim
    cached = isinstance(claims, Claims) and claims.cached
    if cached and q_len > kv_len:
        q_len, kv_len = kv_len, q_len
    padded = on & {"kv_lens", "q_lens"}
    batch = draw.between(*(2, 3) if padded else (1, 2))
    whole = draw.between(0, batch - 1) if padded else 0  # the request without padding
    if q_len == kv_len == 1 and window is None:
        on -= {"causal"}  # nothing to hide
    kv_lens = _ragged(draw, batch, whole, kv_len, window or 1) if "kv_lens" in on else None
    q_lens = _ragged(draw, batch, whole, q_len, 1) if "q_lens" in on else None
    if cached and kv_lens is not None:
        rows = q_lens or (q_len,) * batch
        kv_lens = tuple(max(q, k) for q, k in zip(rows, kv_lens, strict=True))
    return SdpaCase(
        dtype=dtype,
        seed=seed,
        values=fill,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal="causal" in on,
        window=window,
        sinks=sinks,
        softcap=softcap,
        scale=scale,
        kv_lens=kv_lens,
        q_lens=q_lens,
        side="left" if "side" in on and padded else "right",
        layout=layout,
        lse="lse" in on,
        schedule=_split(draw, q_len) if "schedule" in on else (),
        page_size=page_size,
        poison=poison if "poison" in on and on & {"kv_lens", "page_size"} else "finite",
        alibi=alibi,
    )


def _shape(draw: Draw, head_dims: tuple[int, ...]) -> tuple[int, int, int]:
    """(kv_heads, query heads per kv head, head_dim)."""
    return draw.between(1, 3), draw.among(1, 2, 4, 5), draw.among(*head_dims)


def _large_shape(draw: Draw, pairs: int) -> tuple[int, int, int]:
    """A nightly one that `pairs` of query and key cost no more than seconds."""
    fit = [s for s in _LARGE_SHAPES if math.prod(s) * pairs <= LARGEST_WORK]
    return draw.among(*(fit or _LARGE_SHAPES[:1]))


def _lengths(
    draw: Draw, window: int | None, least: int, *, scheduled: bool, plain: bool, large: bool
) -> tuple[int, int]:
    """(q_len, kv_len): one query, few queries over many keys, square, or more queries than keys.

    least: keys. plain: the subject knows no window; squares are what its causal kernel is made for.
    """
    kind = draw.among("single", "square", "longer", "shorter", "shorter")
    more, beyond = draw.either(), draw.among(1, 2, 0, 3, 17, 64)
    kv_len = draw.near(*BLOCKS, low=1, high=4096 if large else 300)
    q_len, surplus = draw.near(8, 16, low=2, high=24), draw.between(1, 23)
    if window is not None:  # around the window, mostly beyond it
        kv_len = window + beyond
    kv_len = max(kv_len, 2 if scheduled else least)
    if scheduled:
        return min(q_len, kv_len), kv_len
    if window is not None:
        return q_len if more else 1, kv_len
    if kind == "single":
        return 1, kv_len
    if kind == "square" or (plain and more):
        return q_len, q_len
    if kind == "longer":
        return q_len, max(least, q_len - surplus)
    return q_len, max(kv_len, q_len + 1)


def _ragged(draw: Draw, batch: int, whole: int, length: int, edge: int) -> tuple[int, ...]:
    """Valid lengths, 0 among them; request `whole` is full and the others are not."""
    lens = [draw.near(edge, low=0, high=length - 1) for _ in range(batch - 1)]
    lens.insert(whole, length)
    return tuple(lens)


def _split(draw: Draw, total: int) -> tuple[int, ...]:
    """At least two chunks that add up to `total`: prefill chunks, then single decode steps."""
    decode = draw.between(0, min(3, total - 1))
    rest, chunks = total - decode, []
    while rest:
        chunk = draw.between(1, rest if decode or chunks else rest - 1)
        chunks.append(chunk)
        rest -= chunk
    return (*chunks, *(1,) * decode)


CASE = SdpaCase

_MODEL = {"dtype": "bfloat16", "seed": 1, "values": "normal", "batch": 1}
PINNED: tuple[tuple[str, SdpaCase], ...] = (
    (
        "gpt-oss-decode",
        SdpaCase(
            **_MODEL, q_len=1, kv_len=200, heads=64, kv_heads=8, head_dim=64, causal=True,
            window=128, sinks=0.0,
        ),
    ),
    (
        "gpt-oss-full-layer",
        SdpaCase(
            **_MODEL, q_len=3, kv_len=67, heads=64, kv_heads=8, head_dim=64, causal=True, sinks=0.0
        ),
    ),
    (
        "llama-3-8b-extend",
        SdpaCase(**_MODEL, q_len=7, kv_len=65, heads=32, kv_heads=8, head_dim=128, causal=True),
    ),
    (
        "gemma-3-4b-local-decode",
        SdpaCase(
            **_MODEL, q_len=1, kv_len=1030, heads=8, kv_heads=4, head_dim=256, causal=True,
            window=1024, scale=0.0625,
        ),
    ),
    (
        "gemma-2-9b-softcap",
        SdpaCase(
            **_MODEL, q_len=2, kv_len=40, heads=16, kv_heads=8, head_dim=256, causal=True,
            softcap=50.0, scale=0.0625,
        ),
    ),
    (
        "qwen-3-8b-chunked-prefill",
        SdpaCase(
            **_MODEL, q_len=12, kv_len=29, heads=32, kv_heads=8, head_dim=128, causal=True,
            schedule=(5, 5, 1, 1),
        ),
    ),
    (
        "mistral-7b-window",
        SdpaCase(
            **_MODEL, q_len=1, kv_len=4098, heads=32, kv_heads=8, head_dim=128, causal=True,
            window=4096,
        ),
    ),
    (
        "bloom-560m-decode",
        SdpaCase(
            **_MODEL, q_len=1, kv_len=130, heads=16, kv_heads=16, head_dim=64, causal=True,
            alibi=8.0,
        ),
    ),
    (
        "mpt-7b-extend",
        SdpaCase(
            **_MODEL, q_len=3, kv_len=65, heads=32, kv_heads=32, head_dim=128, causal=True,
            alibi=8.0,
        ),
    ),
    (
        "baichuan-13b-ragged-prefill",
        SdpaCase(
            **{**_MODEL, "batch": 2}, q_len=9, kv_len=9, heads=40, kv_heads=40, head_dim=128,
            causal=True, kv_lens=(9, 6), q_lens=(9, 6), side="left", alibi=8.0,
        ),
    ),
)  # fmt: skip
"""Attention of published models, by the name of the model."""
