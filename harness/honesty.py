"""Whether a declared program can hide a fault: checked without running any kernel (NUMERICS 4.6).

A declaration may say where a kernel rounds, not what it computes. So what it computes without its
radii, the midpoint, must be among what the dtypes allow of the meaning: a wrong mask, scale or
head map can't be declared away as arithmetic. And it must bound every element that the dtypes
bound: no radius of infinity, which would pass every kernel.
"""

import torch

from cases.case import Case
from harness import programs
from harness.arithmetic.midrad import EPS64
from harness.arithmetic.mode import DET, PROB
from harness.subject import Program


def dishonest(program: Program, case: Case) -> str | None:
    """What is wrong with the declaration in this case, as a sentence, or None."""
    inputs = case.inputs()
    meaning, judged = case.expected(inputs), case.judged(inputs)
    mode = DET if case.structured else PROB
    declared = program(case, inputs, mode)
    envelope = programs.envelope(case.op)(case, inputs, DET)
    for name, truth in meaning.items():
        own, bound, truth = declared[name], envelope[name], truth.double()
        asked = bound.rad.isfinite() & judged.get(name, torch.ones_like(truth).bool())
        apart = (own.mid - truth).abs()
        # The reference and the program are float64 computations of their own.
        room = bound.rad + EPS64 * truth.abs()
        wrong = asked & ~((apart <= room) | (own.mid == truth))
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            return (
                f"{name}{list(where)}: the declared arithmetic gives {float(own.mid[where]):.9g} "
                f"where the meaning is {float(truth[where]):.9g}, and the dtypes of {case.dtype} "
                f"allow {float(room[where]):.3g}; in case {case.to_json()}"
            )
        if bool((unbound := asked & ~own.rad.isfinite()).any()):
            return (
                f"{name}: {int(unbound.sum())} of {int(asked.sum())} elements that the dtypes of "
                f"{case.dtype} bound have no declared bound; in case {case.to_json()}"
            )
    return None
