"""Inputs that were just made, kept for the next subject that is asked the same."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import torch

from cases.case import Case

C = TypeVar("C", bound=Case)
Named = tuple[tuple[str, torch.Tensor], ...]

LIMIT = 256 << 20
"""Bytes of tensors that each op keeps: a pre-merge run's pinned cases, and the last drawn ones."""


def remembered(make: Callable[[C], Named], limit: int = LIMIT) -> Callable[[C], Named]:
    """`make`, with the results of the last calls kept up to `limit` bytes, the last one always.

    Pinned cases are put to every subject of an op; to make their inputs again each time would
    take longer than to judge them.
    """
    kept: OrderedDict[C, Named] = OrderedDict()
    sizes: dict[C, int] = {}

    @functools.wraps(make)
    def inputs(case: C) -> Named:
        if case in kept:
            kept.move_to_end(case)
            return kept[case]
        made = kept[case] = make(case)
        sizes[case] = sum(x.untyped_storage().nbytes() for _, x in made)
        while len(kept) > 1 and sum(sizes.values()) > limit:
            oldest, _ = kept.popitem(last=False)
            del sizes[oldest]
        return made

    return inputs
