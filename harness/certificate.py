"""Certificates: how small a defect the cases that were asked could not have passed (NUMERICS 4.5).

A defect of strength t moves the exact answer by t g, where g is the whole fault of the dictionary:
its answer less the right one. Let c and r be a program's midpoint and radius of an element. The
faulty kernel computes y = c + e + t g with |e| <= r and returns out = round(y). It passes only if
some real x with |x - c| <= r rounds to out too. Then x and y lie within one spacing s of out's
format, s <= 2 u |y| + tiny, so

    t |g| = |(y - x) + (x - c) - e| <= s + 2 r <= 2 u (|c| + r + t |g|) + tiny + 2 r

and a strength above (2 r + 2 u (|c| + r) + tiny) / ((1 - 2 u) |g|) can't pass, however the kernel
rounds. A case rejects when any element does: the least over its elements. Exact outputs (r = 0)
differ by whole units: 1 / (2 |g|).

**What is promised.** `sure`: the least over the cases: these very cases, asked of a kernel with the
defect, reject it. `fresh`: of as many cases drawn anew, the chance that none rejects is below MISS,
by the observed distribution over cases: its quantile 1 - MISS**(1 / n). A case is weighed with the
radii that it is judged by (`prob` for independent values: flagged, and then asked again).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cases import defects
from cases.case import Case
from cases.defects import Defect
from harness import programs
from harness.arithmetic.formats import FORMATS
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import DET, PROB
from harness.subject import Program

MISS = 1e-6
"""How often a fresh draw of as many cases may let a defect of strength `fresh` pass."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Of one fault, in multiples of the whole fault; infinity: it would never be seen.

    shown: cases, of `asked`, in which the fault changes the answer at all.
    """

    fault: str
    sure: float
    fresh: float
    shown: int
    asked: int


def certify(op: str, program: Program, asked: Iterable[Case]) -> tuple[Certificate, ...]:
    """The certificate of every fault of the op's dictionary for these cases under this program."""
    dictionary = defects.load(op)
    found: dict[str, list[float]] = {defect.name: [] for defect in dictionary}
    for case in asked:
        if case.vacuous(case.inputs()):
            continue
        for name, strength in strengths(program, case, dictionary).items():
            found[name].append(strength)
    return tuple(_certificate(name, sorted(found[name])) for name in found)


def coarse(op: str, certificates: Iterable[Certificate]) -> list[str]:
    """A sentence for every certificate that is coarser than the limit that the op declares."""
    limits = programs.load(op).LIMITS
    return [
        f"{op}: {c.fault} of strength {c.sure:.3g} could pass all {c.asked} cases (it shows in "
        f"{c.shown}), the op's limit is {limits.get(c.fault, 1.0):g}: ask what shows it"
        for c in certificates
        if not c.sure <= limits.get(c.fault, 1.0)
    ]


def strengths(program: Program, case: Case, dictionary: Sequence[Defect]) -> dict[str, float]:
    """Per fault, the strength above which this case rejects it; infinity where it can't show."""
    inputs = case.inputs()
    allowed = program(case, inputs, DET if case.structured else PROB)
    right, judged = case.expected(inputs), case.judged(inputs)
    out = {}
    for defect in dictionary:
        wrong = defect.answer(case, inputs) or {}  # the fault can't show
        least = math.inf
        for name in wrong.keys() & right.keys():
            shift = (wrong[name].double() - right[name].double()).abs()
            room = _room(allowed[name], case.output_dtypes()[name])
            mask = judged.get(name, torch.ones_like(shift).bool()) & shift.isfinite() & (shift > 0)
            if bool(mask.any()):
                least = min(least, float((room[mask] / shift[mask]).min()))
        out[defect.name] = least
    return out


def _room(allowed: MidRad, dtype: str) -> torch.Tensor:
    """How far the exact answer may move unseen."""
    if dtype not in FORMATS:
        return allowed.rad * 2 + 0.5
    fmt = FORMATS[dtype]
    spacing = 2 * fmt.u * (allowed.mid.abs() + allowed.rad) + fmt.tiny
    return (2 * allowed.rad + spacing) / (1 - 2 * fmt.u)


def _certificate(name: str, ascending: list[float]) -> Certificate:
    count = len(ascending)
    if not count:
        return Certificate(fault=name, sure=math.inf, fresh=math.inf, shown=0, asked=0)
    rank = math.ceil((1 - MISS ** (1 / count)) * count)
    return Certificate(
        fault=name,
        sure=ascending[0],
        fresh=ascending[rank - 1],
        shown=sum(math.isfinite(strength) for strength in ascending),
        asked=count,
    )
