"""Probes of matrix products: which element of b lands where."""

from collections.abc import Mapping
from typing import Any

import torch

from cases.bmm import INDEX_PROBE, LAYOUTS, BmmCase, names
from cases.case import Inputs

FILLS = (INDEX_PROBE,)

_SMALL: dict[str, Any] = {"seed": 8, "batch": 2, "m": 7, "k": 5, "n": 6}
_SHAPES: tuple[dict[str, Any], ...] = (
    _SMALL,
    {**_SMALL, "batch": 3, "m": 1, "k": 1, "n": 3},
    {**_SMALL, "m": 33, "k": 33, "n": 17},
    {**_SMALL, "m": 64, "k": 64, "n": 48},
    {**_SMALL, "m": 66, "k": 65, "n": 33},
    {**_SMALL, "wide": True},
    *({**_SMALL, name: layout} for name in ("a_layout", "b_layout") for layout in LAYOUTS[1:4]),
)


def first(claims: frozenset[str], dtypes: tuple[str, ...]) -> tuple[BmmCase, ...]:
    """Small sizes, tails and whole tiles, and each layout. A subject of codes is given them."""
    shown: dict[str, Any] = {"values": INDEX_PROBE}
    if "codes" in claims:
        shown["codes"] = True
    found = []
    for i, fields in enumerate(_SHAPES):
        dtype = dtypes[i % len(dtypes)]
        if dtype == "int8" and "codes" in shown:
            continue
        if fields.get("wide") and dtype not in ("bfloat16", "float16"):
            continue
        found.append(BmmCase(**{**fields, **shown, "dtype": dtype}))
    return tuple(found)


def fits(case: BmmCase) -> bool:
    """Always: a name comes again only after many others."""
    del case
    return True


def read(case: BmmCase, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> str | None:
    """Of the first wrong element: the element of b that landed there, and whether all moved so."""
    if case.values != INDEX_PROBE or "out" not in observed:
        return None
    got, right = observed["out"].double(), case.expected(inputs)["out"]
    if "c" in inputs:
        got, right = (x - case.beta * inputs["c"].double() for x in (got, right))
    got, right = got / case.alpha, right / case.alpha
    wrong = ((got - right).abs() > 0.5).nonzero()
    if not len(wrong):
        return None
    where = tuple(wrong[0].tolist())
    entry, row, column = where
    picked = int(inputs["a"][entry, row].double().argmax())
    at = f"batch {entry}, row {row}, column {column}"
    expected = f"expected b[k {picked}, column {column}]"
    value = float(got[where])
    found = _source(case, value, (entry, picked, column))
    if found is None:
        what = "nothing" if value == 0 else f"{value:g}, which is no single element of b"
        return f"{at} is {what}, {expected}"
    other, k, n = found
    of = "" if other == entry else f"batch {other}, "
    return f"{at} is b[{of}k {k}, column {n}], {expected}"


def _source(case: BmmCase, value: float, home: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """The element of b with that name that is nearest to its place: same batch, column, k first."""
    if abs(value - round(value)) > 0.25:
        return None
    places = (names(case) == round(value)).nonzero()
    if not len(places):
        return None
    apart = (places - torch.tensor(home)).abs()
    cost = apart[:, 0] * 10**6 + apart[:, 1] + apart[:, 2] + 10**3 * (apart[:, 1:] > 0).all(-1)
    batch, k, n = places[cost.argmin()].tolist()
    return batch, k, n
