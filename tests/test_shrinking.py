"""Shrinking on trial: a finding ends as few, small, square and featureless as its fault allows."""

import json

import pytest

import cases
from cases import defects
from harness import profiles
from harness.power import planted
from harness.record import Status
from harness.search import search

PROFILE = profiles.load("premerge")
_SDPA = {"batch": 1, "q_len": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "kv_len": 8}
_BMM = {"batch": 1, "m": 1, "n": 1, "k": 1}
_MLA = {"batch": 1, "heads": 1, "kv_len": 16, "latent_dim": 16, "nope_dim": 8, "rope_dim": 8}
_YARN = {"batch": 1, "q_len": 1, "kv_len": 1, "heads": 1, "kv_heads": 1, "head_dim": 64}
SMALLEST = (
    ("sdpa", "causal-ignored", {"causal", "window"}, {**_SDPA, "kv_len": 3}),
    ("sdpa", "sink-dropped", {"sinks"}, _SDPA),
    ("banded_mask", "window-plus-one", {"window"}, {"n": 2}),
    ("banded_mask", "window-ignored-in-decode", {"window", "offset"}, {"n": 1, "offset": 1}),
    ("bmm", "alpha-ignored", {"alpha"}, _BMM),
    ("bmm", "addend-dropped", {"addend"}, _BMM),
    ("bmm", "k-tail-dropped", set(), _BMM),
    ("mla", "k-pe-ignored", set(), _MLA),
    ("yarn", "scaling-dropped", {"yarn", "factor", "original_max"}, _YARN),
    ("yarn", "position-plus-one", set(), _YARN),
    ("yarn", "pairs-swapped", set(), _YARN),
)
"""Op, defect, the features that its smallest case may have, and at most so large a size.

With the window of tests/test_search.py: twelve defects over all five ops.
"""


@pytest.mark.parametrize(
    ("op", "name", "features", "sizes"),
    [pytest.param(*entry, id=f"{entry[0]}-{entry[1]}") for entry in SMALLEST],
)
def test_the_smallest_case_is_small_and_featureless(op, name, features, sizes):
    """Every feature of the op is drawn; what remains is what the fault needs."""
    [defect] = [defect for defect in defects.load(op) if defect.name == name]

    def run(case, inputs):
        wrong = planted.staged(case, inputs, lambda given: defect.answer(case, given))
        return wrong or planted.staged(case, inputs, case.expected)

    module = cases.load(op)
    cell = planted.cell(
        op, run, claims=frozenset(module.FEATURES) - {"codes"}, dtypes=module.DTYPES[:1]
    )
    record = search(cell, PROFILE, 0, lambda record: None, pinned=False)
    assert record is not None
    assert record.status is Status.DISAGREE
    case = module.CASE.from_json(record.case)
    assert case.features() <= features
    assert case.seed == 0
    fields = json.loads(record.case)
    assert {size: fields.get(size) for size in sizes if fields.get(size, 0) > sizes[size]} == {}
