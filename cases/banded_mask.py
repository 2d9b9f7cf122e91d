"""Banded masks and the caches they belong to: what can be asked, how it is drawn, real models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, ClassVar

import torch

from cases.case import Case, Inputs
from cases.drawing import Draw, drawn
from references.banded_mask import banded_mask

FEATURES = {
    "offset": "tokens that live in the cache before the last step; the queries stand behind them",
    "window": "each query sees at most `window` slots, its own included",
    "left_padding": "per request, slots at the left end of the row that hold no token",
    "right_padding": "per request, padding at the right end: of the row, or with `steps` of the "
    "prompt (the leading steps longer than one token), whose tokens then move up to the right",
    "steps": "what happened to the cache before the last step: tokens written (> 0), trimmed (< 0)",
    "size": "tokens that a rotating cache holds; also the window of its layer",
    "keep": "first tokens that a rotating cache never evicts; they count within `size`",
    "chunk": "each query sees only its own chunk of so many slots, as in Llama 4",
}
"""Every optional field, with its meaning."""

WIDTH = 32
"""Channels of a key that carries its token's number: a one, then binary digits."""
DTYPES = ("bool", "float32", "bfloat16", "float16")
WINDOWS = (1, 2, 3, 4, 7, 8, 16, 31, 64)


@dataclass(frozen=True, kw_only=True)
class BandedMaskCase(Case):
    """Which of the tokens ever written each of the `n` queries of the last step sees.

    Output `visible`: bool `[n, written]`, or `[batch, n, written]` where a padding is given.
    Output `stray`, where there is a cache to look into (`steps`, `size`): bool `[n]` or
    `[batch, n]`, rows that see a slot without a token in it.

    dtype: "bool" for a mask of that kind, else the format of additive masks and cached keys.

    Raises:
        ValueError: fields that contradict each other.
    """

    op: ClassVar[str] = "banded_mask"
    n: int
    offset: int = 0
    window: int | None = None
    left_padding: tuple[int, ...] | None = None
    right_padding: tuple[int, ...] | None = None
    steps: tuple[int, ...] = ()
    size: int | None = None
    keep: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"{what}; got {self.to_json()}")

        need(self.n >= 1 and self.offset >= 0, "n must be at least 1, offset at least 0")
        for name, value in (("window", self.window), ("size", self.size), ("chunk", self.chunk)):
            need(value is None or value >= 1, f"{name} must be at least 1")
        need(self.window is None or self.size is None or self.window <= self.size, "window > size")
        need(
            self.keep == 0 or (self.size is not None and 0 < self.keep < self.size),
            "keep needs a size greater than itself",
        )
        need(self.keep == 0 or self.window is None, "keep and window have no agreed meaning")
        need(self.chunk is None or self.window is self.size is None, "chunk excludes a window")
        left, right = self.left_padding, self.right_padding
        need(left is None or right is None or len(left) == len(right), "paddings of one batch")
        need(bool(left is None or left) and bool(right is None or right), "paddings must not be ()")
        prompt, live = self.prompt, 0
        for step in self.steps:
            need(step != 0, "a step writes or trims at least one token")
            need(
                step > 0 or (-step <= live and (self.size is None or live < self.size)),
                "a trim removes tokens that live, from a rotating cache only before it is full",
            )
            live += step
        need(not self.steps or live == self.offset, "steps must add up to offset")
        need(min(left or (0,)) >= 0 and max(left or (0,)) <= self.offset + self.n, "left_padding")
        top = prompt if self.steps else self.offset + self.n
        need(min(right or (0,)) >= 0 and max(right or (0,)) <= top, "right_padding")

    @property
    def structured(self) -> bool:
        return True

    @property
    def batch(self) -> int | None:
        """Requests, or None where no padding tells them apart."""
        padding = self.left_padding or self.right_padding
        return len(padding) if padding else None

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return prompt_length(self.steps)

    @property
    def written(self) -> int:
        """Tokens ever written, trimmed ones included."""
        return self.n + (sum(s for s in self.steps if s > 0) if self.steps else self.offset)

    @property
    def trims(self) -> bool:
        return any(step < 0 for step in self.steps)

    @property
    def padded(self) -> bool:
        return self.batch is not None

    @property
    def wrapped(self) -> bool:
        """The newest cached token was written alone to a rotating cache that was full."""
        return (
            self.steps[-1:] == (1,)
            and self.reach is not None
            and self.offset > (self.size or self.reach)
        )

    @property
    def held(self) -> bool:
        """Whether the question is about a cache, not about a mask alone."""
        return bool(self.steps) or self.size is not None

    @property
    def reach(self) -> int | None:
        """Slots that a query sees at most."""
        return self.size if self.window is None else self.window

    @property
    def work(self) -> int:
        return (self.batch or 1) * self.n * self.written

    def output_dtypes(self) -> Mapping[str, str]:
        return {"visible": "bool", **({"stray": "bool"} if self.held else {})}

    def output_shapes(self) -> Mapping[str, tuple[int, ...]]:
        rows = (self.n,) if self.batch is None else (self.batch, self.n)
        return {"visible": (*rows, self.written), **({"stray": rows} if self.held else {})}

    def axes(self) -> Mapping[str, tuple[str, ...]]:
        rows = ("query",) if self.batch is None else ("request", "query")
        return {"visible": (*rows, "token"), "stray": rows}

    def inputs(self) -> Inputs:
        """`tokens` `[batch, 1, written, WIDTH]`: what to write to a cache as keys and values.

        Its rows are numbers of tokens that `observed` reads back from whatever the cache returns.
        """
        dtype = torch.float32 if self.dtype == "bool" else getattr(torch, self.dtype)
        return {"tokens": numbered(self.written, self.batch or 1).to(dtype)}

    def expected(self, inputs: Inputs) -> Inputs:
        del inputs
        return dict(_expected(self))

    def dead(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        blind = ~self.expected(inputs)["visible"].any(-1)
        if not bool(blind.any()):
            return {}
        wide = blind[..., None].expand(self.output_shapes()["visible"])
        return {"visible": wide, **({"stray": blind} if self.held else {})}

    def vacuous(self, inputs: Inputs) -> str | None:
        if len(self.steps) == 1:
            return "steps: a single one, which is an offset"
        if self.steps:  # a schedule is a question of its own, also where nothing is hidden yet
            return None
        plain: dict[str, Any] = {
            "window": {"window": None},
            "size": {} if self.window else {"size": None, "keep": 0},
            "keep": {"keep": 0},
            "chunk": {"chunk": None},
            "left_padding": {"left_padding": (0,) * (self.batch or 1)},
            "right_padding": {"right_padding": (0,) * (self.batch or 1)},
        }
        visible = self.expected(inputs)["visible"]
        for name in sorted(plain.keys() & self.features()):
            other = replace(self, **plain[name]).expected(inputs)["visible"]
            if plain[name] and torch.equal(visible, other):
                return f"{name}={getattr(self, name)}: no key is hidden or shown by it"
        return None


def prompt_length(steps: tuple[int, ...]) -> int:
    """Tokens in the leading steps longer than one token."""
    return sum(takewhile(lambda step: step > 1, steps))


def numbered(count: int, batch: int) -> torch.Tensor:
    """Float64 `[batch, 1, count, WIDTH]`: token t as a one and the binary digits of t + 1."""
    digits = torch.arange(1, count + 1)[:, None] >> torch.arange(WIDTH - 1) & 1
    rows = torch.cat([torch.ones(count, 1), digits.double()], dim=-1)
    return rows.double().expand(batch, 1, count, WIDTH).contiguous()


def observed(
    case: BandedMaskCase, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> Inputs:
    """The outputs of the case, from what a cache returned and the mask that goes with it.

    mask: bool, broadcastable to `[batch, n, slots]`. keys, values: `[batch, 1, slots, WIDTH]`, one
    token's number in each slot, the same in both; up to half a unit of quantisation is read over.
    A token is visible where exactly one visible slot holds it: two would weigh it twice. Nothing is
    visible through a mask that does not fit the keys.
    """
    power = 1 << torch.arange(WIDTH - 1)
    number = [((x[:, 0, :, 1:] > 0.5) * power).sum(-1) for x in (keys, values)]
    valid = (keys[:, 0, :, 0] > 0.5) & (number[0] == number[1]) & (number[0] <= case.written)
    slot = torch.where(valid, number[0], 0)  # 0: a slot that holds no token
    batch, slots = slot.shape
    fits = mask.shape[-1] in (1, slots)
    shown = (mask if fits else mask.new_zeros(1)).broadcast_to(batch, case.n, slots).int()
    count = torch.zeros(batch, case.n, case.written + 1, dtype=torch.int32)
    count.scatter_add_(-1, slot[:, None].expand_as(shown), shown)
    rows = {"visible": count[..., 1:] == 1}
    if case.held:
        rows["stray"] = count[..., 0] > 0
    return rows if case.batch is not None else {name: x[0] for name, x in rows.items()}


@lru_cache(maxsize=64)
def _expected(case: BandedMaskCase) -> tuple[tuple[str, torch.Tensor], ...]:
    batch, total = case.batch, case.offset + case.n
    left = case.left_padding or (0,) * (batch or 1)
    right = case.right_padding or (0,) * (batch or 1)
    row_end = None if case.steps else right
    padding: dict[str, Any] = {"left_padding": left, "right_padding": row_end}
    if case.steps:
        both = zip(left, right, strict=True)
        padding["left_padding"] = [min(a + b, total) for a, b in both]
    shown = banded_mask(
        case.n,
        case.offset,
        window=case.reach,
        keep=case.keep,
        chunk=case.chunk,
        **(padding if batch is not None else {}),
    ).broadcast_to(batch or 1, case.n, total)
    visible = torch.zeros(batch or 1, case.n, case.written, dtype=torch.bool)
    for b, request in enumerate(shown):
        visible[b][:, living(case, right[b])] = request
    out = {"visible": visible, "stray": torch.zeros(batch or 1, case.n, dtype=torch.bool)}
    if not case.held:
        del out["stray"]
    return tuple((name, (x if batch is not None else x[0]).double()) for name, x in out.items())


def living(case: BandedMaskCase, right: int) -> list[int]:
    """The tokens in the slots of a request's row at the last step, oldest slot first."""
    row: list[int] = []
    written = 0
    for step in (*(case.steps or (case.offset,)), case.n):
        if step < 0:
            del row[step:]
        row.extend(range(written, written + max(step, 0)))
        written += max(step, 0)
        if (
            step > 0 and case.steps and right and written == case.prompt
        ):  # padding moves to the left end
            row = row[-right:] + row[:-right]
    return row


@drawn
def strategy(
    draw: Draw, claims: frozenset[str], dtypes: tuple[str, ...], large: bool = False
) -> BandedMaskCase:
    """Cases that use only claimed features; shrinks towards few, small and featureless.

    A subject that claims `size` is a rotating cache, and is always given one or a window; one that
    claims `chunk` is a chunked mask, and is given chunks unless it is given a window; one that
    claims `steps` is a cache, which learns of right padding with its prompt.

    large: nightly sizes (windows to 512 slots).
    """
    on = draw.subset(claims, FEATURES)
    on = on - {"chunk"} if on & {"window", "size"} else on | ({"chunk"} & claims)
    if "right_padding" in on:
        on |= {"steps"} & claims
    if "keep" in on:
        on = on - {"window"}
    if "size" in claims and not on & {"window", "chunk"}:
        on |= {"size"}
    reach = draw.among(*WINDOWS, *((128, 300, 512) if large else ()))
    size = reach if "size" in on else None
    window = None
    if "window" in on:
        window = draw.near(reach, low=1, high=max(reach - 1, 1)) if size else reach
    top = 3 * reach + 24
    alone = (True, True, False) if "keep" in on else (True, False)  # where keeping shows longest
    n = 1 if draw.among(*alone) else draw.near(1, reach, low=1, high=min(top, 64))
    steps: tuple[int, ...] = ()
    offset, full = 0, False
    if "steps" in on:
        steps = _schedule(draw, reach, size or window if "size" in claims else None)
        if size and size > n + 1 and draw.either():
            full = True  # to the last slot, and no further; or not quite
            held = draw.near(size, low=n + 2, high=size)
            first = draw.between(1, held - n - 1)
            steps = (first, held - n - first)
        offset = sum(steps)
    elif "offset" in on:
        offset = draw.near(reach, max(reach - n, 0), low=0, high=top)
    beyond = 4 if on >= {"chunk", "left_padding"} else 1
    short = reach + beyond - offset - n
    stay = full or (steps and draw.either())  # nothing is hidden yet
    if on & {"window", "size", "chunk"} and short > 0 and not stay:
        steps = (*steps, short) if steps else ()
        offset, n = (offset + short, n) if "offset" in on or steps else (offset, n + short)
    return BandedMaskCase(
        dtype=draw.among(*dtypes),
        seed=draw.seed(),
        n=n,
        offset=offset,
        window=window,
        steps=steps,
        size=size,
        keep=draw.between(1, size - 1) if "keep" in on and size and size > 1 else 0,
        chunk=reach if "chunk" in on else None,
        **_padding(draw, on, steps, offset + n, size or window, 3 if "chunk" in on else None),
    )


def _schedule(draw: Draw, reach: int, size: int | None) -> tuple[int, ...]:
    """Prefill chunks, decode steps and trims, around the length of the window."""
    steps: list[int] = []
    top = 2 * reach + 8 if size is None else size - 1
    trims = top > 0 and draw.either()
    if trims:  # a rotating cache can only be trimmed before it is full
        first = draw.near(reach, low=1, high=top)
        steps = [first, -draw.near(first, low=1, high=first)]
    for _ in range(draw.between(0 if trims else 2, 6)):
        live = sum(steps)
        may_trim = trims and live > 0 and (size is None or live < size)
        match draw.among("chunk", "decode", *(("trim",) if may_trim else ())):
            case "chunk":
                steps.append(draw.near(reach, reach - live, low=1, high=2 * reach + 8))
            case "decode":
                steps += [1] * draw.near(min(reach, 24), low=1, high=min(2 * reach, 40))
            case "trim":
                steps.append(-draw.near(live, low=1, high=live))
    return tuple(steps)


def _padding(
    draw: Draw,
    on: frozenset[str],
    steps: tuple[int, ...],
    row: int,
    window: int | None,
    most: int | None,
) -> dict[str, tuple[int, ...]]:
    """Padding of each request, none to all of it; the first one's reaches into the window.

    most: of left padding, where more would hide what else is asked.
    """
    hides = window is not None and "left_padding" in on  # all that the window of one query hides
    batch = draw.between(2 if hides else 1, 3)
    tops = {
        "left_padding": row if most is None else min(row, most),
        "right_padding": prompt_length(steps) if steps else row,
    }
    least = {"left_padding": max(1, row - window + 1) if window else 1, "right_padding": 1}
    found = {}
    for name, top in tops.items():
        if name in on and top:
            low = min(least[name], top)
            first = draw.near(low, low=low, high=top)
            rest = [draw.near(1, 3, low=0, high=top) for _ in range(batch - 1)]
            if name == "left_padding" and hides:
                rest[-1] = 0
            # One request on the left, another on the right: together they may hide all there is.
            found[name] = (first, *rest) if name == "left_padding" else (*rest, first)
    return found


CASE = BandedMaskCase

_MODEL = {"dtype": "bool", "seed": 1}
PINNED: tuple[tuple[str, BandedMaskCase], ...] = (
    ("gpt-oss-decode", BandedMaskCase(**_MODEL, n=1, offset=200, window=128)),
    ("gpt-oss-chunked-prefill", BandedMaskCase(**_MODEL, n=24, offset=120, window=128)),
    ("gemma-3-1b-edge", BandedMaskCase(**_MODEL, n=2, offset=511, window=512)),
    ("gemma-3-4b-decode", BandedMaskCase(**_MODEL, n=1, offset=1024, window=1024)),
    ("mistral-7b-decode", BandedMaskCase(**_MODEL, n=1, offset=4097, window=4096)),
    ("llama-4-chunk-edge", BandedMaskCase(**_MODEL, n=3, offset=8191, chunk=8192)),
    ("left-padded-batch", BandedMaskCase(**_MODEL, n=5, offset=3, left_padding=(0, 2, 6))),
    (
        "gpt-oss-rotating-cache",
        BandedMaskCase(
            dtype="bfloat16", seed=1, n=1, offset=152, steps=(150, 1, 1), size=128
        ),
    ),
    (
        "gemma-3-rotating-chunks",
        BandedMaskCase(
            dtype="bfloat16", seed=1, n=9, offset=600, steps=(300, 298, 1, 1), size=512
        ),
    ),
    (
        "speculative-decode-trimmed",
        BandedMaskCase(
            dtype="bfloat16", seed=1, n=4, offset=38, steps=(37, 5, -4), window=16
        ),
    ),
)  # fmt: skip
"""Masks and caches of published models, by the name of the model, and of what servers do."""
