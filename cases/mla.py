"""Multi-head latent attention: what can be asked, how it is drawn, and shapes of real models."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from cases import values
from cases.case import Case, Inputs
from cases.drawing import Draw, drawn
from cases.memory import remembered
from cases.probes.weights import ladder, rung
from references import mla as reference

FEATURES = {
    "q_len": "several new tokens per request: extend, causal lower-right (1 is decode)",
    "mscale": "YaRN's attention factor: the softmax scale is mscale**2 / sqrt(nope + rope)",
    "q_lens": "new tokens per request (ragged batch, packed); zero is allowed",
    "kv_lens": "keys per request, new ones included: unequal prefixes",
    "page_size": "the cache is pages of so many rows, out of order, with foreign pages between",
    "splits": "keys are cut into so many parts, attended apart and merged; some may be empty",
    "padding": "so many more rows that belong to no request: slot -1, output without a meaning",
    "poison": "nan: what must not be read holds NaN instead of a large finite number",
    "layout": "joined: q_nope and q_pe are columns of one tensor, and so are latent and k_pe",
    "lse": "the log of the softmax denominator is returned too (natural log)",
    "stages": "absorbed q, latent output and the written cache are returned too",
    "schedule": "new tokens per call: each chunk is written, then attends; must equal one call",
}
"""Every optional field, with its meaning."""

DTYPES = ("float32", "bfloat16", "float16")
PAGES = (1, 16, 32, 64)
SIZES = (
    # latent, rope, nope, v: small ones first
    (16, 8, 8, 8),
    (32, 16, 32, 16),
    (64, 16, 32, 32),
    (24, 6, 10, 16),
    (128, 32, 64, 64),
    (512, 64, 128, 128),
    (512, 64, 192, 256),
)
PROBES = ("page_probe", "key_probe")
"""Fills that `cases.probes` reads back: the latent of key j is a multiple of unit vector j, another
one for each request, and W_UV shows its columns. page_probe: q is 0, all visible keys weigh alike;
key_probe: the rotated part of key j is unit vector j, and q_pe gives the keys a ladder of logits.
"""
HEADS = (1, 2, 16, 3, 7, 128)
MSCALES = (1.2608, 1.3689, 1.05)
"""DeepSeek V2 and V3 (factor 40), and one near 1."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of the op: which of the packed tokens it brings, and its lengths per request."""

    tokens: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MlaCase(Case):
    """`q_len` new tokens in each of `batch` requests that have `kv_len` keys with them.

    Tensors are packed: rows of request 0, then of request 1, ... then `padding` rows. Inputs, with
    T rows, H heads, L latent columns, R rotated ones:

        q_nope [T, H, nope]     q_pe [T, H, R]          latent [T, L]       k_pe [T, R]
        w_uk [H, nope, L]       w_uv [H, L, v]
        cache [pages, page_size, L + R]   before the call: prefixes, and poison elsewhere
        slots int64 [T]         where each new row goes, in rows of the cache; negative: nowhere
        table int32 [B, n]      pages of each request in order; past its last page, a poisoned one

    Without `page_size` the cache is [B, kv_len, L + R] and the table says so.
    Lengths in tokens; `q_lens` and `kv_lens` replace `q_len` and `kv_len` request by request.

    Raises:
        ValueError: fields that contradict each other.
    """

    op: ClassVar[str] = "mla"
    values: str
    batch: int
    kv_len: int
    heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_len: int = 1
    mscale: float | None = None
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    page_size: int | None = None
    splits: int = 1
    padding: int = 0
    poison: str = "finite"
    layout: str = "packed"
    lse: bool = False
    stages: bool = False
    schedule: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"{what}; got {self.to_json()}")

        fills = (*values.NAMES, *PROBES)
        need(self.values in fills, f"values must be one of {', '.join(fills)}")
        sizes = (
            self.batch, self.q_len, self.heads, self.latent_dim, self.rope_dim, self.nope_dim,
            self.v_dim, self.splits, self.page_size or 1,
        )  # fmt: skip
        need(min(sizes) >= 1, "batch, q_len, heads, columns, splits and pages must be at least 1")
        need(self.padding >= 0, "padding must not be negative")
        mscale = 1.0 if self.mscale is None else self.mscale
        need(mscale > 0 and math.isfinite(mscale), "mscale must be positive and finite")
        need(self.poison in ("finite", "nan"), "poison must be finite or nan")
        need(self.layout in ("packed", "joined"), "layout must be packed or joined")
        queries, keys = self.lengths()
        need(
            len(queries) == len(keys) == self.batch
            and 0 <= min(queries) <= max(queries) <= self.q_len
            and max(keys) <= self.kv_len
            and all(n <= k for n, k in zip(queries, keys, strict=True)),
            "each request must have no more new tokens than keys, within q_len and kv_len",
        )
        need(sum(queries) >= 1, "some request must have a new token")
        if self.schedule:
            need(sum(self.schedule) == self.q_len, "schedule must add up to q_len")
            need(min(self.schedule) >= 1, "schedule steps must be at least 1")
            need(not (self.q_lens or self.kv_lens or self.padding), "schedule excludes ragged rows")

    @property
    def softmax_scale(self) -> float:
        return (self.mscale or 1.0) ** 2 / math.sqrt(self.nope_dim + self.rope_dim)

    @property
    def width(self) -> int:
        """Columns of a cache row."""
        return self.latent_dim + self.rope_dim

    @property
    def tokens(self) -> int:
        """Rows that belong to a request."""
        return sum(self.lengths()[0])

    @property
    def rows(self) -> int:
        """Rows of every packed tensor."""
        return self.tokens + self.padding

    @property
    def structured(self) -> bool:
        return self.values not in values.INDEPENDENT

    @property
    def work(self) -> int:
        return self.rows * self.heads * self.latent_dim * (self.kv_len + self.nope_dim + self.v_dim)

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(new tokens, keys) of each request."""
        return (
            self.q_lens or (self.q_len,) * self.batch,
            self.kv_lens or (self.kv_len,) * self.batch,
        )

    def whole(self) -> Step:
        """All tokens in one call."""
        queries, keys = self.lengths()
        return Step(tokens=tuple(range(self.rows)), q_lens=queries, kv_lens=keys)

    def steps(self) -> tuple[Step, ...]:
        """Every call of the schedule, or the one call without."""
        if not self.schedule:
            return (self.whole(),)
        out, start = [], 0
        for step in self.schedule:
            end = start + step
            out.append(
                Step(
                    tokens=tuple(
                        b * self.q_len + i for b in range(self.batch) for i in range(start, end)
                    ),
                    q_lens=(step,) * self.batch,
                    kv_lens=(self.kv_len - self.q_len + end,) * self.batch,
                )
            )
            start = end
        return tuple(out)

    def output_dtypes(self) -> Mapping[str, str]:
        shown = dict.fromkeys(("q_latent", "o_latent", "cache") if self.stages else (), self.dtype)
        return {"out": self.dtype, **({"lse": "float32"} if self.lse else {}), **shown}

    def output_shapes(self) -> Mapping[str, tuple[int, ...]]:
        heads = (self.rows, self.heads)
        shapes = {
            "out": (*heads, self.v_dim),
            "lse": heads,
            "q_latent": (*heads, self.latent_dim),
            "o_latent": (*heads, self.latent_dim),
            "cache": (self._pages(), self.page_size or self.kv_len, self.width),
        }
        return {name: shapes[name] for name in self.output_dtypes()}

    def axes(self) -> Mapping[str, tuple[str, ...]]:
        heads = ("token", "head")
        return {
            "out": (*heads, "column"),
            "lse": heads,
            "q_latent": (*heads, "latent column"),
            "o_latent": (*heads, "latent column"),
            "cache": ("page", "row", "column"),
        }

    def place(self, output: str, where: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        if output == "cache":
            return self._owners(where)
        token, *rest = where
        counts = torch.tensor(self.lengths()[0])
        request = torch.arange(self.batch).repeat_interleave(counts)
        named = {"request": request[token], "position": self.positions()[token]}
        if self.schedule:
            ends = torch.tensor(self.schedule).cumsum(0)
            named["call"] = torch.bucketize(token % self.q_len, ends, right=True)
        return named | dict(zip(self.axes()[output][1:], rest, strict=True))

    def _owners(self, where: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Places in the cache, with the request and position whose row it is; -1: nobody's."""
        page, row, column = where
        size = self.page_size or self.kv_len
        table, owner = self.inputs()["table"], torch.full((2, self._pages() * size), -1)
        for request, length in enumerate(self.lengths()[1]):
            at = torch.arange(length)
            slots = table[request, at // size].long() * size + at % size
            owner[0, slots], owner[1, slots] = request, at
        request, position = owner[:, page * size + row]
        return {
            "request": request, "position": position, "page": page, "row": row, "column": column,
        }  # fmt: skip

    def inputs(self) -> Inputs:
        return dict(_inputs(self))

    def anchored(self, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> Inputs:
        if not self.stages:
            return inputs
        return {**inputs, **{name: observed[name] for name in ("q_latent", "o_latent")}}

    def written(self, inputs: Inputs) -> torch.Tensor:
        """The cache after all new rows have been written to their slots."""
        return reference.write_cache(
            inputs["cache"], inputs["latent"], inputs["k_pe"], inputs["slots"]
        )

    def visible(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Per request, bool [new tokens, keys]; an input `visible` [T, kv_len] overrides it."""
        queries, keys = self.lengths()
        if "visible" not in inputs:
            return tuple(reference.causal(n, k) for n, k in zip(queries, keys, strict=True))
        rows = inputs["visible"].split((*queries, self.padding))[: self.batch]
        return tuple(mask[:, :k] for mask, k in zip(rows, keys, strict=True))

    def expected(self, inputs: Inputs) -> Inputs:
        cache = self.written(inputs)
        queries, keys = self.lengths()
        got = reference.mla(
            inputs["q_nope"],
            inputs["q_pe"],
            cache,
            inputs["table"],
            inputs["w_uk"],
            inputs["w_uv"],
            q_lens=queries,
            kv_lens=keys,
            scale=self.softmax_scale,
            visible=self.visible(inputs),
            q_latent=inputs.get("q_latent"),
            o_latent=inputs.get("o_latent"),
        )
        # What is observed of a stage is judged against the stage, not against itself.
        fresh = reference.absorb(inputs["q_nope"], inputs["w_uk"])
        out = {
            "out": got.out, "lse": got.lse, "q_latent": fresh, "o_latent": got.o_latent,
            "cache": cache.double(),
        }  # fmt: skip
        return {name: out[name] for name in self.output_dtypes()}

    def judged(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        masks = {}
        if self.padding:
            real = torch.arange(self.rows) < self.tokens
            for name, shape in self.output_shapes().items():
                if name != "cache":
                    masks[name] = real.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)
        if self.stages and self.poison == "nan":
            masks["cache"] = ~self.written(inputs).isnan()
        return masks

    def vacuous(self, inputs: Inputs) -> str | None:
        on = self.features()
        queries, keys = self.lengths()
        if "q_lens" in on and min(queries) == self.q_len:
            return "q_lens: every request has q_len new tokens"
        if "kv_lens" in on and min(keys) == self.kv_len:
            return "kv_lens: every request has kv_len keys"
        if "schedule" in on and len(self.schedule) == 1:
            return "schedule: a single step"
        alone = max(k for n, k in zip(queries, keys, strict=True) if n) == 1
        for name in ("mscale", "splits"):
            if name in on and alone:
                return f"{name}: every token sees one key, whose weight is 1"
        if "mscale" in on and not bool(inputs["q_nope"].any() or inputs["q_pe"].any()):
            return "mscale: all scores are zero"
        return None

    def _pages(self) -> int:
        if self.page_size is None:
            return self.batch
        return sum(-(-k // self.page_size) for k in self.lengths()[1]) + SPARE

    def positions(self) -> torch.Tensor:
        """int64 [tokens]: where in its request each new token stands."""
        queries, keys = self.lengths()
        return torch.cat([torch.arange(k - n, k) for n, k in zip(queries, keys, strict=True)])


SPARE = 2
"""Pages that no request has, all poison."""


def _table(case: MlaCase) -> torch.Tensor:
    """int32 [B, n]: the pages of each request, out of order."""
    keys = case.lengths()[1]
    if case.page_size is None:
        return torch.arange(case.batch, dtype=torch.int32)[:, None]
    pages = case._pages()
    order = torch.from_numpy(values.words(case.seed, "pages", pages).argsort(kind="stable").copy())
    counts = [-(-k // case.page_size) for k in keys]
    used = sum(counts)
    if torch.equal(order[:used], torch.arange(used)):
        order = order.roll(1)
    # A negative slot taken as an index means the last row: let it be a live one, if a page is full.
    full = [k // case.page_size for k in keys]
    for request, count in enumerate(full):
        if count:
            entry = sum(counts[:request]) + count - 1
            last = int((order == pages - 1).nonzero())
            order[[entry, last]] = order[[last, entry]]
            break
    table = torch.full((case.batch, max(counts) + 1), int(order[-1]), dtype=torch.int32)
    for request, mine in enumerate(order[:used].split(counts)):
        table[request, : len(mine)] = mine
    return table


@remembered
def _inputs(case: MlaCase) -> tuple[tuple[str, torch.Tensor], ...]:
    filled = _filled(case)
    bad = math.nan if case.poison == "nan" else values.poison(case.dtype)
    queries, keys = case.lengths()
    page = case.page_size or case.kv_len
    table = _table(case)
    rows = filled.pop("rows")  # [B, kv_len, L + R]
    cache = torch.full((case._pages() * page, case.width), bad, dtype=torch.float64)
    new, slots = [], []
    for b, (n, k) in enumerate(zip(queries, keys, strict=True)):
        at = torch.arange(k)
        where = table[b, at // page].long() * page + at % page
        cache[where[: k - n]] = rows[b, : k - n]
        new.append(rows[b, k - n : k])
        slots.append(where[k - n :])
    new.append(torch.full((case.padding, case.width), bad, dtype=torch.float64))
    slots.append(torch.full((case.padding,), -1))
    fresh = torch.cat(new)
    queries_ = torch.cat([filled.pop("q_nope"), filled.pop("q_pe")], -1)
    out = {name: values.cast(x, case.dtype) for name, x in filled.items()}
    out |= _parts(case, "q_nope", "q_pe", queries_, case.nope_dim)
    out |= _parts(case, "latent", "k_pe", fresh, case.latent_dim)
    out["cache"] = values.cast(cache, case.dtype).reshape(-1, page, case.width)
    out["slots"] = torch.cat(slots)
    out["table"] = table
    return tuple(out.items())


def _parts(
    case: MlaCase, left: str, right: str, both: torch.Tensor, columns: int
) -> dict[str, torch.Tensor]:
    cast = values.cast(both, case.dtype)
    parts = {left: cast[..., :columns], right: cast[..., columns:]}
    if case.layout == "joined":
        return parts
    return {name: x.contiguous() for name, x in parts.items()}


def _filled(case: MlaCase) -> dict[str, torch.Tensor]:
    """Queries, rows and weights as float64, of the fill that the case names."""

    def normal(name: str, *shape: int) -> torch.Tensor:
        return values.normal(case.seed, name, shape)

    latent, heads = case.latent_dim, case.heads
    q_nope = normal("q_nope", case.rows, heads, case.nope_dim)
    q_pe = normal("q_pe", case.rows, heads, case.rope_dim)
    rows = normal("rows", case.batch, case.kv_len, case.width)
    w_uk = normal("w_uk", heads, case.nope_dim, latent) / math.sqrt(latent)
    w_uv = normal("w_uv", heads, latent, case.v_dim) / math.sqrt(latent)
    half = latent // 2
    match case.values:
        case "small":
            q_nope, q_pe, rows = q_nope / 16, q_pe / 16, rows / 64
        case "loud":
            q_nope, q_pe = q_nope * 4, q_pe * 4
        case "peaked":  # one key lies along the first query, in its rotated part
            j = int(values.integers(case.seed, "peak", (1,), 0, case.kv_len - 1))
            rows[:, j, latent:] = q_pe[0, 0] * 6
        case "flat":
            q_nope, q_pe = q_nope / 64, q_pe / 64
        case "cancel":  # halves of the latent part of every score nearly cancel
            w_uk[..., half : 2 * half] = -w_uk[..., :half]
            jitter = normal("jitter", case.batch, case.kv_len, half)
            rows[..., half : 2 * half] = rows[..., :half] * (1 + jitter / 1024)
        case "alternating":  # neighbouring values cancel
            sign = 1.0 - 2.0 * (torch.arange(case.kv_len) % 2)[:, None]
            rows[..., :latent] = rows[..., :latent].abs() * sign
            q_nope, q_pe = q_nope / 8, q_pe / 8
        case "zeros":
            q_nope[..., ::2] = 0
            rows[:, : case.kv_len // 2] = 0
            w_uv[..., ::3] = 0
        case "subnormal":
            w_uv = w_uv * values.tiny(case.dtype)
        case "constant":
            fills = ((q_nope, 0.1), (q_pe, 0.3), (rows, 0.7), (w_uk, 0.05), (w_uv, 0.02))
            q_nope, q_pe, rows, w_uk, w_uv = (torch.full_like(x, c) for x, c in fills)
        case "outlier":  # loud channels, as in real checkpoints
            q_nope[..., 1 % case.nope_dim] *= 16
            rows[..., 3 % latent] *= 16
            rows[..., latent] *= 4
        case "positive":
            q_nope, q_pe, rows, w_uk, w_uv = (x.abs() for x in (q_nope, q_pe, rows, w_uk, w_uv))
            q_nope = q_nope / 4
        case "grid":  # few bits: sums are exact
            q_nope, q_pe, rows = ((x * 2).round() / 2 for x in (q_nope, q_pe, rows))
            w_uk, w_uv = ((x * 8).round() / 8 for x in (w_uk, w_uv))
        case "steady":
            rows[..., :latent] = 1 + rows[..., :latent] / 128
            q_nope = q_nope / 4
        case "page_probe" | "key_probe":
            owner = 4.0 ** torch.arange(case.batch).double()[:, None, None]
            names = torch.eye(case.kv_len, latent).double()
            q_nope, rows[..., :latent] = torch.zeros_like(q_nope), owner * names
            w_uv = torch.eye(latent, case.v_dim).double().repeat(heads, 1, 1)
            q_pe = torch.zeros_like(q_pe)
            if case.values == "key_probe":
                row, column = torch.arange(case.rows)[:, None, None], torch.arange(case.rope_dim)
                q_pe += ladder(rung(case.softmax_scale), row, torch.arange(heads)[:, None], column)
                rows[..., latent:] = torch.eye(case.kv_len, case.rope_dim).double()
    return {"q_nope": q_nope, "q_pe": q_pe, "rows": rows, "w_uk": w_uk, "w_uv": w_uv}


class Claims(frozenset[str]):
    """Features that a subject supports, with the sizes that it has kernels for.

    sizes: of SIZES, as (latent, rope, nope, v). pages: page sizes; its cache is always paged.
    Equal only to claims that draw the same cases.
    """

    sizes: tuple[tuple[int, int, int, int], ...]
    pages: tuple[int, ...]

    def __new__(
        cls,
        names: Iterable[str],
        *,
        sizes: tuple[tuple[int, int, int, int], ...],
        pages: tuple[int, ...],
    ) -> Self:
        self = super().__new__(cls, frozenset(names) | {"page_size"})
        self.sizes, self.pages = sizes, pages
        return self

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and vars(self) == getattr(other, "__dict__", {})

    def __hash__(self) -> int:
        return hash((frozenset(self), self.sizes, self.pages))

    def lacking(self, case: MlaCase) -> str | None:
        """The refusal of a case of other sizes, or None."""
        columns = case.latent_dim, case.rope_dim
        if columns not in {size[:2] for size in self.sizes}:
            return f"{columns[0]} + {columns[1]} columns: there is no kernel for them"
        if case.page_size not in self.pages:
            return f"page_size {case.page_size}: expected one of {', '.join(map(str, self.pages))}"
        return None


@drawn
def strategy(
    draw: Draw, claims: frozenset[str], dtypes: tuple[str, ...], large: bool = False
) -> MlaCase:
    """Cases that use only claimed features; shrinks towards few, small and featureless.

    claims: names from FEATURES. large: nightly sizes, in an eighth of the draws (some 20 times the
    pre-merge work).
    """
    large = large and draw.rarely()
    on = draw.subset(claims, FEATURES)
    on |= {"q_len"} & claims if "schedule" in on else frozenset()
    budget = 4_000_000 if large else 200_000  # rows * keys * heads * latent
    most_weights = 17_000_000 if large else 600_000  # 128 heads of 512 columns, or 4
    sizes, pages = getattr(claims, "sizes", SIZES), getattr(claims, "pages", PAGES)
    on |= {"page_size"} if isinstance(claims, Claims) else frozenset()
    latent, rope, nope, v_dim = draw.among(*sizes)
    weights = latent * (nope + v_dim)
    heads = draw.among(*[h for h in HEADS if h == 1 or h * weights <= most_weights])
    scheduled = {"schedule", "q_len"} <= on
    ragged = bool(on & {"q_lens", "kv_lens"}) and not scheduled
    batch = draw.between(*(2, 3) if ragged else (1, 2))
    room = max(budget // (heads * latent), 3)  # rows * keys
    most = max(2, min(12, room // (8 * batch)))
    q_len = draw.between(2, most) if "q_len" in on else 1
    top = max(q_len + 1, min(room // (batch * q_len), 4096 if large else 300))
    page = draw.among(*pages) if "page_size" in on else None
    low = q_len + (1 if on & {"kv_lens", "mscale", "splits"} else 0)
    kv_len = draw.near(page or 16, 2 * (page or 32), low=low, high=top)
    splits = draw.among(2, 3, 4, 8) if "splits" in on else 1
    lengths: dict[str, Any] = {}
    if ragged:
        # One request is as long as q_len and kv_len say, and another is shorter.
        whole = draw.between(0, batch - 1)
        queries = [q_len] * batch
        if "q_lens" in on:
            shorter = [draw.between(0, q_len - 1) for _ in queries]
            queries = [q_len if b == whole else shorter[b] for b in range(batch)]
            lengths["q_lens"] = tuple(queries)
        if "kv_lens" in on:
            fewer = [draw.near(n, page or 16, low=n, high=kv_len - 1) for n in queries]
            keys = [kv_len if b == whole else fewer[b] for b in range(batch)]
            lengths["kv_lens"] = tuple(keys)
    return MlaCase(
        dtype=draw.among(*dtypes),
        seed=draw.seed(),
        values=draw.mostly("normal", values.NAMES),
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=heads,
        latent_dim=latent,
        rope_dim=rope,
        nope_dim=nope,
        v_dim=v_dim,
        mscale=draw.among(*MSCALES) if "mscale" in on else None,
        page_size=page,
        splits=splits,
        padding=draw.between(1, 3) if "padding" in on and not scheduled else 0,
        poison="nan" if "poison" in on else "finite",
        layout="joined" if "layout" in on else "packed",
        lse="lse" in on,
        stages="stages" in on,
        schedule=_chunks(draw, q_len) if scheduled else (),
        **lengths,
    )


def _chunks(draw: Draw, total: int) -> tuple[int, ...]:
    """At least two chunks that add up to `total`: prefill first, then single decode steps."""
    decode = draw.between(0, min(3, total - 1))
    rest, chunks = total - decode, []
    while rest:
        chunk = draw.between(1, rest if chunks or decode else rest - 1)
        chunks.append(chunk)
        rest -= chunk
    return (*chunks, *(1,) * decode)


CASE = MlaCase

_DEEPSEEK = {
    "dtype": "bfloat16", "seed": 1, "values": "normal",
    "latent_dim": 512, "rope_dim": 64, "nope_dim": 128, "v_dim": 128,
}  # fmt: skip
PINNED: tuple[tuple[str, MlaCase], ...] = (
    (
        "deepseek-v2-lite-decode-tp4",
        MlaCase(**_DEEPSEEK, batch=1, kv_len=33, heads=4, mscale=1.2608),
    ),
    (
        "deepseek-v2-extend-tp16",
        MlaCase(**_DEEPSEEK, batch=1, q_len=2, kv_len=9, heads=8, mscale=1.2608),
    ),
    (
        "deepseek-v3-decode-tp16",
        MlaCase(
            **_DEEPSEEK, batch=2, kv_len=66, heads=8, mscale=1.3689, page_size=64,
            kv_lens=(66, 3), splits=4, stages=True,
        ),
    ),
    (
        "deepseek-r1-chunked-prefill-tp32",
        MlaCase(
            **_DEEPSEEK, batch=1, q_len=6, kv_len=17, heads=4, mscale=1.3689,
            schedule=(3, 2, 1),
        ),
    ),
    (
        "kimi-k2-decode-tp16",
        MlaCase(**_DEEPSEEK, batch=1, kv_len=20, heads=4, mscale=1.3466),
    ),
    (
        "glm-4.7-flash-decode-tp4",
        MlaCase(**{**_DEEPSEEK, "nope_dim": 192, "v_dim": 256}, batch=1, kv_len=24, heads=5),
    ),
    (
        "minicpm3-extend-tp4",
        MlaCase(
            **{**_DEEPSEEK, "latent_dim": 256, "rope_dim": 32, "nope_dim": 64, "v_dim": 64},
            batch=1, q_len=3, kv_len=20, heads=10,
        ),
    ),
)  # fmt: skip
"""Latent attention of published models, by the name of the model and the tensor-parallel share of
its heads (128 in V2, V3 and R1, 64 in K2, 20 in GLM, 40 in MiniCPM3); 128 are drawn nightly."""
