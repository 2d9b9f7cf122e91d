"""Wrong versions of banded masks and of the caches behind them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cases.banded_mask import BandedMaskCase, living
from cases.case import Inputs
from cases.defects import Ask, Defect, Lasting, Question

Shift = Callable[[BandedMaskCase, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(case, visible, position, slot) to the faulty `visible`; see `_slots`."""


def _window(change: int) -> Ask:
    """The whole band is wider or narrower; a band of no slots is the narrowest."""

    def ask(case: BandedMaskCase, inputs: Inputs) -> Question | None:
        if case.reach is None or case.reach + change < max(1, case.keep + 1):
            return None
        width = case.reach + change
        if not case.keep:
            size = None if case.size is None else max(case.size, width)
            return replace(case, window=width, size=size), inputs
        return None if case.trims else (replace(case, size=width), inputs)

    return ask


def _without(*names: str, when: Callable[[BandedMaskCase], bool] = lambda case: True) -> Ask:
    """The feature is not looked at."""

    def ask(case: BandedMaskCase, inputs: Inputs) -> Question | None:
        if not case.features() & set(names) or not when(case):
            return None
        off: dict[str, Any] = {
            "left_padding": (0,) * (case.batch or 1),
            "right_padding": (0,) * (case.batch or 1),
            "keep": 0,
            "window": None,
            "size": None if case.size is None else max(case.size, case.offset + case.n),
            "chunk": None,
        }
        chosen = {name: off[name] for name in names}
        if "size" in names:
            chosen["keep"] = 0
        return replace(case, **chosen), inputs

    return ask


def _mirrored(case: BandedMaskCase, inputs: Inputs) -> Question | None:
    """Padding is taken to stand on the other side."""
    if case.steps or case.left_padding == case.right_padding:
        return None
    swapped: dict[str, Any] = {
        "left_padding": case.right_padding,
        "right_padding": case.left_padding,
    }
    return replace(case, **swapped), inputs


def _itself(when: Callable[[BandedMaskCase], bool]) -> Ask:
    return lambda case, inputs: (case, inputs) if when(case) else None


def _changed(shift: Shift) -> Callable[[BandedMaskCase, Inputs], Inputs]:
    """The answer with the tokens that `shift` says visible instead."""

    def answer(case: BandedMaskCase, out: Inputs) -> Inputs:
        visible = out["visible"].bool()
        rows = visible if case.batch is not None else visible[None]
        faulty = torch.stack(
            [shift(case, row, *_slots(case, b)) for b, row in enumerate(rows.unbind())]
        )
        return {**out, "visible": (faulty if case.batch is not None else faulty[0]).double()}

    return answer


def _slots(case: BandedMaskCase, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query's position `[n, 1]`, and the slot of each token ever written, -1 if trimmed."""
    right = case.right_padding[request] if case.right_padding else 0
    slot = torch.full((case.written,), -1)
    slot[living(case, right)] = torch.arange(case.offset + case.n)
    return torch.arange(case.n)[:, None] + case.offset, slot


def _behind(case: BandedMaskCase, position: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Within the band, whatever else hides the slot."""
    band = slot <= position
    return band if case.reach is None else band & (slot > position - case.reach)


def _upper_left(case: BandedMaskCase, visible: Any, position: Any, slot: Any) -> torch.Tensor:
    return _behind(case, position - case.offset, slot) & (slot >= 0)


def _one_ahead(case: BandedMaskCase, visible: Any, position: Any, slot: Any) -> torch.Tensor:
    return visible | (slot == position + 1)


def _absolute(case: BandedMaskCase, visible: Any, position: Any, slot: Any) -> torch.Tensor:
    """The cache holds `reach - 1 + n` slots at most; their numbers are taken for positions."""
    held = min((case.reach or 1) - 1 + case.n, case.offset + case.n)
    place = slot - (case.offset + case.n - held)
    return visible & _behind(case, position, place)


def _evicted(case: BandedMaskCase, visible: Any, position: Any, slot: Any) -> torch.Tensor:
    """Only the last `reach` slots are there when a chunk attends."""
    return visible & (slot >= case.offset + case.n - (case.reach or 1))


def _too_early(case: BandedMaskCase, visible: Any, position: Any, slot: Any) -> torch.Tensor:
    """The oldest token that anybody sees is gone."""
    oldest = torch.where(visible.any(0), slot, case.written).amin()
    return visible & (slot != oldest)


def _come_back(case: BandedMaskCase, visible: Any, position: Any, slot: Any) -> torch.Tensor:
    """Trimmed tokens stay in front of what is written after them, as far as the band reaches."""
    place = torch.arange(case.written)
    last = torch.arange(case.written - case.n, case.written)[:, None]
    return visible | ((slot < 0) & _behind(case, last, place))


def _newest(case: BandedMaskCase, visible: Any, position: Any, slot: Any) -> torch.Tensor:
    return visible & (slot != position)


def _sliding(case: BandedMaskCase, visible: Any, position: Any, slot: Any) -> torch.Tensor:
    """A chunk is taken for a window of as many slots."""
    return (slot <= position) & (slot > position - (case.chunk or 1)) & (slot >= 0)


def _stray(case: BandedMaskCase, out: Inputs) -> Inputs:
    """Every row sees a slot that nothing was written to."""
    return {**out, "stray": torch.ones_like(out["stray"])}


def _window_of_the_first_call() -> Ask:
    """One mask is made in the first layer that has a window, and serves every later one."""
    first: list[int] = []

    def ask(case: BandedMaskCase, inputs: Inputs) -> Question | None:
        if case.window is None:
            return None
        first.append(case.window)
        size = None if case.size is None else max(case.size, first[0])
        return replace(case, window=first[0], size=size), inputs

    return ask


DEFECTS = (
    Defect(
        name="window-plus-one",
        bugs=("B002", "B034", "B056"),
        sentence="window off by one: W+1 slots visible",
        question=_window(+1),
    ),
    Defect(
        name="window-minus-one",
        bugs=(),
        sentence="window off by one: W-1 slots visible",
        question=_window(-1),
    ),
    Defect(
        name="window-ignored",
        bugs=(),
        sentence="window ignored: every earlier slot visible",
        question=_without("window", "size"),
    ),
    Defect(
        name="window-ignored-in-decode",
        bugs=("B005", "B006"),
        sentence="window ignored for a single query",
        question=_without("window", "size", when=lambda case: case.n == 1),
    ),
    Defect(
        name="upper-left",
        bugs=("B011", "B013", "B014"),
        sentence="mask aligned to the upper left: the cached tokens are not counted",
        question=_itself(lambda case: case.offset > 0 and case.n > 1),
        answer_of=_changed(_upper_left),
    ),
    Defect(
        name="upper-left-in-decode",
        bugs=("B015", "B059"),
        sentence="a single query sees the first slot alone",
        question=_itself(lambda case: case.offset > 0 and case.n == 1),
        answer_of=_changed(_upper_left),
    ),
    Defect(
        name="causal-plus-one",
        bugs=(),
        sentence="causal off by one: one slot of the future visible",
        question=_itself(lambda case: case.n > 1),
        answer_of=_changed(_one_ahead),
    ),
    Defect(
        name="own-key-missing",
        bugs=(),
        sentence="a query does not see its own key",
        question=_itself(lambda case: True),
        answer_of=_changed(_newest),
    ),
    Defect(
        name="left-padding-ignored",
        bugs=("B057",),
        sentence="left padding visible",
        question=_without("left_padding"),
    ),
    Defect(
        name="right-padding-ignored",
        bugs=("B021",),
        sentence="right padding visible",
        question=_without("right_padding"),
    ),
    Defect(
        name="padding-mirrored",
        bugs=(),
        sentence="padding hidden on the other side",
        question=_mirrored,
    ),
    Defect(
        name="rotating-absolute",
        bugs=("B030", "B008"),
        sentence="slots of a rotating cache taken for positions",
        question=_itself(
            lambda case: case.size is not None and case.offset + case.n > case.size - 1 + case.n
        ),
        answer_of=_changed(_absolute),
    ),
    Defect(
        name="rotating-evicts-before-chunk",
        bugs=("B055",),
        sentence="the cache is cut to its size before a chunk of several queries attends",
        question=_itself(
            lambda case: bool(case.size and case.n > 1 and case.offset + case.n > case.size)
        ),
        answer_of=_changed(_evicted),
    ),
    Defect(
        name="rotating-rolls-early",
        bugs=("B051", "B052"),
        sentence="the oldest token is evicted one step before the cache is full",
        question=_itself(
            lambda case: bool(case.size and case.size > 1 and case.offset + case.n == case.size)
        ),
        answer_of=_changed(_too_early),
    ),
    Defect(
        name="trim-lies",
        bugs=(),
        sentence="trimmed tokens come back with the next ones",
        question=_itself(lambda case: case.trims),
        answer_of=_changed(_come_back),
    ),
    Defect(
        name="keep-forgotten",
        bugs=(),
        sentence="tokens that the rotating cache should keep are evicted",
        question=_without("keep"),
    ),
    Defect(
        name="chunk-ignored",
        bugs=(),
        sentence="chunk ignored: every earlier slot visible",
        question=_without("chunk"),
    ),
    Defect(
        name="chunk-slides",
        bugs=(),
        sentence="a chunk taken for a sliding window",
        question=_itself(lambda case: case.chunk is not None and case.batch is None),
        answer_of=_changed(_sliding),
    ),
    Defect(
        name="empty-slots-visible",
        bugs=("B053",),
        sentence="slots of a rotating cache visible before anything is written to them",
        question=_itself(lambda case: case.size is not None and case.offset + case.n < case.size),
        answer_of=_stray,
    ),
)
"""The fault dictionary: each is planted by the tests and looked for in every residual."""

LASTING = (
    Lasting(
        name="window-of-the-first-call",
        bugs=("B007",),
        sentence="window of an earlier call",
        begin=_window_of_the_first_call,
    ),
)
