"""How much is asked: before a merge, every night, or until told to stop."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The size of a run.

    examples: cases drawn per cell; slow_examples: for subjects that compile per shape, 0 for none.
    large: nightly sizes. seed: fixed, or None to draw one and print it.
    least: a cell that judged fewer cases than this is not evidence. Some refuse most of what is
        drawn, for a dtype that the CPU lacks or a table that would be too long.
    vacuous: the largest share of cases that may be unable to tell.
    """

    name: str
    examples: int
    slow_examples: int
    large: bool
    seed: int | None
    least: int
    vacuous: float = 0.15


PROFILES = {
    p.name: p
    for p in (
        Profile(name="premerge", examples=60, slow_examples=0, large=False, seed=0, least=30),
        Profile(
            name="nightly", examples=1500, slow_examples=12, large=True, seed=None, least=300,
        ),
        Profile(
            name="fuzz", examples=10**9, slow_examples=10**9, large=True, seed=None, least=1,
        ),
    )
}  # fmt: skip


def load(name: str) -> Profile:
    """The profile of that name.

    Raises:
        ValueError: no such profile.
    """
    if name not in PROFILES:
        raise ValueError(f"profile={name!r} is unknown; expected one of {', '.join(PROFILES)}")
    return PROFILES[name]
