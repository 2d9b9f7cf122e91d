"""The cases that a cell is asked: old findings, pinned cases, and what the generator draws."""

import hashlib
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed, settings

import cases
from cases import sdpa
from cases.case import Case
from harness import corpus

KINDS = {
    "bmm": (frozenset({"codes"}), frozenset({"a_layout", "codes"})),
    "sdpa": (frozenset({"page_size", "poison"}), frozenset(sdpa.FEATURES) - {"layout", "lse"}),
}
"""Where no kernel has all features, two kinds of kernel: all features but the first set's, and
those of the second set alone. (A bmm that takes codes can't do without them; attention over pages
packs its inputs itself, so it takes them in no layout, and gives no LSE.)"""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A case, and whether the generator drew it (else it is pinned, or was a finding once)."""

    case: Case
    drawn: bool = True


def kinds(op: str) -> tuple[frozenset[str], ...]:
    """What a kernel that has everything claims; of each kind of kernel, if there are several."""
    features = frozenset(cases.load(op).FEATURES)
    if op not in KINDS:
        return (features,)
    without, alone = KINDS[op]
    return features - without, alone


def asked(
    op: str,
    dtype: str,
    budget: int,
    *,
    claims: frozenset[str] | None = None,
    run_seed: int = 0,
    pinned: bool = True,
    old: bool = True,
) -> list[Question]:
    """All questions to a kernel of that dtype, in the order of `harness.search`."""
    claims = kinds(op)[0] if claims is None else claims
    given = [entry.case for entry in corpus.read(corpus.FOLDER, op)[0]] if old else []
    given += [case for _, case in cases.load(op).PINNED] if pinned else []
    return [
        *(
            Question(case=case, drawn=False)
            for case in given
            if case.dtype == dtype and case.features() <= claims
        ),
        *(Question(case=case) for case in drawn(op, dtype, budget, claims, run_seed)),
    ]


def drawn(
    op: str, dtype: str, count: int, claims: frozenset[str], run_seed: int = 0
) -> tuple[Case, ...]:
    """The first `count` pre-merge cases of the op's ordinary generator in one dtype.

    Every dtype has a seed of its own, or all would be asked the same cases.
    """
    strategy = cases.load(op).strategy(claims, (dtype,))
    own = int.from_bytes(hashlib.sha256(f"{run_seed}:{op}:{dtype}".encode()).digest()[:8], "little")
    found: list[Case] = []

    @seed(own)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )
    @given(case=strategy)
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return tuple(found)
