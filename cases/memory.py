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
    total = 0

    @functools.wraps(make)
    def inputs(case: C) -> Named:
        nonlocal total
        if case in kept:
            kept.move_to_end(case)
            return kept[case]
        made = kept[case] = make(case)
        total += _size(made)
        while len(kept) > 1 and total > limit:
            total -= _size(kept.popitem(last=False)[1])
        return made

    return inputs


def _size(named: Named) -> int:
    """Bytes of the storages behind the tensors."""
    return sum(x.untyped_storage().nbytes() for _, x in named)
