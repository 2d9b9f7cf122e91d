"""Right kernels under the rules of others, and under ours: what a rule's alarms are worth."""

from dataclasses import dataclass, field, replace
from typing import Any

from cases.case import Case, Inputs
from harness import runtimes
from harness.cells import cells
from harness.lane import Tier
from harness.power import plain, planted, questions
from harness.power.rules import RULES, Answers
from harness.record import BAD, JUDGED
from harness.run import Cell, judge
from harness.subject import Tensors


@dataclass(kw_only=True)
class Right:
    """A right kernel in one dtype: cases that it was judged in, and how many each rule rejects.

    rejected: by ours.
    """

    op: str
    kernel: str
    dtype: str
    judged: int = 0
    rejected: int = 0
    rules: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))


def kernels(op: str) -> list[Cell]:
    """The reference rounded once, a plain PyTorch run, and every subject that runs here.

    Each subject on one lane; those that compile for every shape, or sit in a worker, are left out.
    """

    def once(case: Any, tensors: Tensors) -> Tensors:
        return planted.staged(case, tensors, case.expected) or {}

    claims = questions.kinds(op)[0]
    found = [
        planted.cell(op, once, name=f"reference.{op}.rounded", claims=claims),
        planted.cell(op, plain.OPS[op], name=f"plain.{op}.torch", claims=claims),
    ]
    seen: set[str] = set()
    for cell in cells([op]):
        runs = cell.presence.tier is not Tier.ABSENT and not cell.subject.slow and not cell.place
        if runs and cell.subject.name not in seen:
            seen.add(cell.subject.name)
            found.append(cell)
    return found


def right(cell: Cell, dtype: str, budget: int, run_seed: int = 0) -> Right:
    """The kernel on `budget` cases that are drawn for what it claims, accepted divergences aside.

    Raises:
        ValueError: it does not take that dtype.
    """
    if dtype not in cell.subject.dtypes:
        raise ValueError(f"dtype={dtype!r}: {cell.subject.name} takes {cell.subject.dtypes}")
    said: dict[str, Any] = {}

    def run(case: Case, tensors: Tensors) -> Tensors:
        said.update(cell.subject.run(case, tensors))
        return dict(said)

    spied = replace(cell, subject=replace(cell.subject, run=run))
    fetch = runtimes.load(cell.subject.runtime).fetch
    tally = Right(op=cell.op, kernel=cell.subject.name, dtype=dtype)
    for case in questions.drawn(cell.op, dtype, budget, cell.subject.claims, run_seed):
        if cell.divergences(case):
            continue
        said.clear()
        record = judge(case, spied)
        if record.status not in JUDGED:
            continue
        tally.judged += 1
        tally.rejected += record.status in BAD
        inputs = case.inputs()
        answers = about(cell.op, case, inputs)
        observed = {name: fetch(x) for name, x in said.items()}
        for name, rule in RULES.items():
            tally.rules[name] += not answers.passes(rule, observed)
    return tally


def about(op: str, case: Case, inputs: Inputs) -> Answers:
    """What the rules are told of a case."""
    return Answers(
        right=planted.in_full(case, case.expected(inputs)),
        plain=plain.OPS[op](case, inputs),
        judged=case.judged(inputs),
    )
