"""One invocation: which profile and seed it has, and how a cell is put to trial in it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cases.case import Case
from harness import corpus, machine
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
    """keep: takes every record. examples: cases drawn per cell instead of the profile's number.

    pinned: whether the op's pinned cases are asked. corpus: the folder of old findings, which are
        asked first, and which takes new ones; None for neither.
    """

    profile: Profile
    seed: int
    keep: Callable[[Record], None]
    examples: int | None = None
    pinned: bool = True
    corpus: Path | None = None

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
        found = search(
            cell,
            self.profile,
            self.seed,
            self.keep,
            examples=self.examples,
            pinned=self.pinned,
            corpus=self._old(cell.op),
        )
        if found is not None:
            raise Finding("\n".join((sentence(found), *self._saved(found))))

    def _old(self, op: str) -> list[Case]:
        if self.corpus is None:
            return []
        return [entry.case for entry in corpus.read(self.corpus, op)[0]]

    def _saved(self, found: Record) -> list[str]:
        """Save the finding; a sentence on how to go on, or on why it is not saved."""
        if self.corpus is None:
            return []
        try:
            corpus.save(self.corpus, corpus.Entry.of(found, machine.versions()))
        except corpus.CorpusError as error:
            return [f"not saved: {error}"]
        return [f"again: parity replay {found.case_id}"]


def sentence(record: Record) -> str:
    """The finding as a person reads it: where, what, and the case to replay."""
    return (
        f"{record.subject}@{record.lane} ({record.tier}): {record.status}: {record.why}\n"
        f"smallest case {record.case_id}: {record.case}"
    )
