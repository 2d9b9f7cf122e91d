"""The defects of one op in one dtype, put to what its ordinary generator draws."""

from collections.abc import Callable, Sequence

from cases import defects
from cases.defects import Defect, Fault
from harness import engines, programs
from harness.power import questions
from harness.power.trial import Tally, Trial
from harness.record import Record
from harness.subject import Program

HELD_TO = ("envelope", "declared")

DECLARED = {
    "bmm": "native.bmm.packed",
    "mla": "native.mla.torch_extend",
    "sdpa": "native.sdpa.torch_plain",
    "yarn": "native.yarn.torch",
}
"""Subjects that claim every feature of their op; kernels of declared arithmetic have theirs."""


def declared(op: str) -> Program | None:
    """The arithmetic of kernels that declare one; None where the op has no rounding."""
    if programs.load(op).EXACT:
        return None
    return next(
        subject.programs["cpu"]
        for subject in engines.subjects("native", op)
        if subject.name == DECLARED[op]
    )


def measure(
    op: str,
    dtype: str,
    budget: int,
    *,
    held_to: str = "envelope",
    run_seed: int = 0,
    pinned: bool = True,
    old: bool = True,
    faults: Sequence[Fault] | None = None,
    named: bool = True,
    rules: bool = True,
    again: bool = True,
    keep: Callable[[Record], None] = lambda record: None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> list[Tally]:
    """What became of every defect (or of `faults`) in `budget` drawn cases.

    held_to: "envelope" plants them into kernels that declare nothing, which is what a person's own
        kernel is; but those that only round otherwise, and that the dtypes alone may allow, into
        kernels of declared arithmetic. "declared" plants all of them into such kernels.
    pinned, old: whether pinned cases and those of the corpus are asked beforehand.
    named, rules, again, keep: as in `Trial`.
    step: told how many of how many questions are done.

    Where an op has several kinds of kernel (`questions.KINDS`), a defect that the first kind can't
    have is put to the next.
    """
    known = tuple(defects.planted(op) if faults is None else faults)
    program = declared(op)
    apart = [f for f in known if program and (held_to == "declared" or _rounds(f))]
    groups = [([f for f in known if f not in apart], None), (apart, program)]
    tallies: dict[str, Tally] = {}
    for group, arithmetic in groups:
        left = group
        for claims in questions.kinds(op):
            if not left:
                break
            trial = Trial(
                op, dtype, program=arithmetic, faults=left, named=named, rules=rules, again=again,
                keep=keep,
            )  # fmt: skip
            asked = questions.asked(
                op, dtype, budget, claims=claims, run_seed=run_seed, pinned=pinned, old=old
            )
            for number, question in enumerate(asked, 1):
                trial.put(question)
                step(number, len(asked))
            for tally in trial.tallies:
                if tally.defect not in tallies or not tally.equivalent:
                    tallies[tally.defect] = tally
            left = [fault for fault in left if tallies[fault.name].equivalent]
    return [tallies[fault.name] for fault in known]


def _rounds(fault: Fault) -> bool:
    return isinstance(fault, Defect) and fault.rounding
