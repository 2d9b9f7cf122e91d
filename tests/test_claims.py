"""Claims on trial: what a subject claims is what it may be asked, not what it must be."""

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

import cases
from cases.case import Case
from harness.cells import cells
from harness.lane import Tier
from harness.record import Status
from harness.run import Cell, judge

HERE = [cell for cell in cells() if cell.place is None and cell.presence.tier is not Tier.ABSENT]
FEW = 3
QUICK = [cell for cell in HERE if not cell.subject.slow]


def without(case: Any, features: frozenset[str], dtype: str) -> Case | None:
    """The case with these features off; None where the others can't be without them."""
    plain: dict[str, Any] = {f.name: f.default for f in fields(case) if f.name in features}
    plain["dtype"] = dtype
    try:
        return replace(case, **plain)
    except ValueError:
        return None


def asked(cell: Cell) -> Iterator[Case]:
    """Small pinned cases of each claimed feature with it taken off, and some with all taken off."""
    pinned = sorted((case for _, case in cases.load(cell.op).PINNED), key=lambda case: case.work)
    claims = cell.subject.claims
    for features, having in (
        (claims, pinned),
        *(
            (frozenset({name}), [case for case in pinned if name in case.features()])
            for name in sorted(claims)
        ),
    ):
        lesser = (
            without(case, (case.features() - claims) | features, cell.subject.dtypes[0])
            for case in having
        )
        able = (case for case in lesser if case is not None and not cell.subject.refuses(case))
        yield from itertools.islice(able, FEW)


@pytest.mark.parametrize("mine", [pytest.param(cell, id=cell.name) for cell in QUICK])
def test_no_claimed_feature_is_needed(mine):
    """One that is must be a refusal, with the reason: an error would be the kernel's."""
    for case in dict.fromkeys(asked(mine)):
        record = judge(case, mine)
        assert record.status is not Status.ERROR, f"{case}: {record.why}"


@pytest.mark.parametrize("odd", [{"nope_dim": 7}, {"latent_dim": 15}, {"rope_dim": 3}], ids=str)
def test_odd_sizes_of_mla_are_refused_where_pairs_are_rotated(odd):
    case = next(case for name, case in cases.load("mla").PINNED if not case.features())
    small = {"heads": 2, "latent_dim": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 8, "kv_len": 3}
    for mine in HERE:
        if mine.op == "mla":
            record = judge(replace(case, dtype="float32", **{**small, **odd}), mine)
            assert record.status in (Status.AGREE, Status.REFUSED), record.why
