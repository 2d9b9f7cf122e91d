"""One invocation: which profile and seed it has, and how a cell is put to trial in it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.engines import EngineError
from harness.lane import Presence, Tier
from harness.profiles import Profile
from harness.record import Record
from harness.run import Cell
from harness.search import search


class Absent(Exception):
    """The cell can't run here; carries the reason."""


class Finding(AssertionError):
    """A cell was judged wrong; the message says in what, and on which smallest case."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """keep: takes every record. examples: cases drawn per cell instead of the profile's number."""

    profile: Profile
    seed: int
    keep: Callable[[Record], None]
    examples: int | None = None

    @property
    def least(self) -> int:
        """Cases that a cell must judge to be evidence."""
        if self.examples is None:
            return self.profile.least
        return max(1, self.examples * self.profile.least // self.profile.examples)

    @property
    def slow(self) -> bool:
        """Whether subjects that compile per shape are asked at all."""
        return self.profile.slow_examples > 0

    def judge(self, cell: Cell | EngineError) -> None:
        """Search the cell for a case that it answers wrong.

        Raises:
            Absent: it can't run here. Recorded, with the reason.
            Finding: it is wrong in a case. Recorded, with the smallest such case.
            EngineError: the cell stands for an adapter that can't be loaded.
        """
        __tracebackhide__ = True
        if isinstance(cell, EngineError):
            raise cell
        if cell.presence.tier is not Tier.ABSENT and cell.subject.slow and not self.slow:
            cell = replace(
                cell,
                presence=Presence(
                    tier=Tier.ABSENT,
                    reason="each new shape compiles: judged in the nightly profile only",
                ),
            )
        if cell.presence.tier is Tier.ABSENT:
            self.keep(cell.absent())
            raise Absent(cell.presence.reason)
        found = search(cell, self.profile, self.seed, self.keep, examples=self.examples)
        if found is not None:
            raise Finding(sentence(found))


def sentence(record: Record) -> str:
    """The finding as a person reads it: where, what, and the case to replay."""
    return (
        f"{record.subject}@{record.lane} ({record.tier}): {record.status}: {record.why}\n"
        f"smallest case {record.case_id}: {record.case}"
    )
