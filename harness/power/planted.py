"""Kernels made to be right or wrong, as cells: what a defect looks like to the ordinary path."""

from collections.abc import Callable
from typing import Any

import torch

import cases
from cases.case import Case, Inputs
from cases.defects import Defect
from harness import contract, programs
from harness.arithmetic.formats import FORMATS, round_to
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import DET, PROB
from harness.lane import Presence, Tier
from harness.run import Cell
from harness.subject import Program, Subject, Tensors


def cell(
    op: str,
    run: Callable[[Any, Tensors], Any],
    program: Program | None = None,
    **more: Any,
) -> Cell:
    """A cell of the cpu lane around `run`; held to `program`, or to the envelope."""
    module = cases.load(op)
    subject = Subject(
        run=run,
        programs={} if program is None else {"cpu": program},
        **{
            "name": f"planted.{op}.subject",
            "claims": frozenset(module.FEATURES),
            "dtypes": module.DTYPES,
            **more,
        },
    )
    return Cell(op=op, subject=subject, lane="cpu", presence=HERE)


HERE = Presence(tier=Tier.HARDWARE, device="cpu")


def rounded(case: Case, allowed: dict[str, MidRad]) -> dict[str, torch.Tensor]:
    """A program's own rounding: what a perfect subject of that arithmetic answers."""
    out = {}
    for name, dtype in case.output_dtypes().items():
        mid = allowed[name].mid
        if dtype in FORMATS:
            mid = round_to(mid, FORMATS[dtype])
        out[name] = mid.to(getattr(torch, dtype))
    return out


def mode(case: Case) -> Any:
    return DET if case.structured else PROB


def faithful(op: str, program: Program | None = None) -> Callable[[Any, Tensors], Tensors]:
    """A perfect subject: the program's (or the envelope's) midpoint, rounded."""
    chosen = program or programs.envelope(op)

    def run(case: Any, tensors: Tensors) -> Tensors:
        return rounded(case, chosen(case, tensors, mode(case)))

    return run


def faulty(program: Program, defect: Defect, case: Any, inputs: Inputs) -> Inputs | None:
    """What a kernel of this arithmetic with this defect answers, or None where it can't show."""
    asked = defect.question(case, inputs)
    if asked is None:
        return None
    other, changed = asked
    answer = {name: x.mid for name, x in program(other, changed, mode(case)).items()}
    if defect.answer_of is not None:
        answer = defect.answer_of(case, answer)
    return in_full(case, answer)


def in_full(case: Case, answer: Inputs) -> dict[str, torch.Tensor]:
    """Float64 outputs rounded once, into the dtypes that the case asks for."""
    return rounded(case, {name: MidRad(x.double()) for name, x in answer.items()})


def staged(
    case: Case, inputs: Inputs, says: Callable[[Inputs], Inputs | None]
) -> dict[str, torch.Tensor] | None:
    """What a kernel answers that rounds `says` once, or None where that is None.

    Where an op shows its intermediates, each later stage starts from those before it as they were
    rounded: a right kernel that did not would be wrong in its last stage.
    """
    if (answer := says(inputs)) is None:
        return None
    out = in_full(case, answer)
    while (given := case.anchored(inputs, out)) is not inputs:
        if (answer := says(given)) is None:
            break
        before, out = out, in_full(case, answer)
        if contract.same(before, out) is None:
            break
    return out
