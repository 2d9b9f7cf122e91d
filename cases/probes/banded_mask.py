"""Reading a mask: its answer already is the set of tokens that each query sees."""

from collections.abc import Mapping

import torch

from cases.banded_mask import BandedMaskCase
from cases.case import Inputs
from cases.ranges import ranges

FILLS = ()


def first(claims: frozenset[str], dtypes: tuple[str, ...]) -> tuple[BandedMaskCase, ...]:
    """None: every case is read back as it is."""
    del claims, dtypes
    return ()


def fits(case: BandedMaskCase) -> bool:
    """Always."""
    del case
    return True


def read(case: BandedMaskCase, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> str | None:
    """The first query that sees other tokens than it should."""
    if "visible" not in observed:
        return None
    got, right = observed["visible"], case.expected(inputs)["visible"].bool()
    wrong = (got != right).any(-1).nonzero()
    if not len(wrong):
        return None
    where = tuple(wrong[0].tolist())
    at = ", ".join(f"{axis} {i}" for axis, i in zip(case.axes()["stray"], where, strict=True))
    seen, expected = (x[where].nonzero().flatten().tolist() for x in (got, right))
    said = f"{at} sees tokens {ranges(seen)}, expected {ranges(expected)}"
    if case.reach is not None and len(expected) == case.reach != len(seen):
        said += f": {len(seen)} where the window is {case.reach}"
    return said
