"""No declared program can hide a fault: every subject's, over drawn cases, without a kernel."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import cases
from cases import defects
from cases.case import Case
from harness import engines, programs
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import DET
from harness.honesty import dishonest
from harness.programs import sdpa
from harness.subject import Program, Subject

DRAWN = 4
"""Cases per dtype."""


def declared() -> list[tuple[str, str, Subject, Program]]:
    """(op, device, subject, program) of every program once, with a subject that declares it."""
    found = {}
    for engine in engines.NAMES:
        for op in engines.ops(engine) if engines.absent(engine) is None else ():
            for subject in engines.subjects(engine, op):
                for device, program in subject.programs.items():
                    found.setdefault((op, id(program)), (op, device, subject, program))
    return list(found.values())


def drawn(op: str, subject: Subject, dtype: str) -> list[Case]:
    found: list[Case] = []

    @seed(0)
    @settings(
        max_examples=DRAWN, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(case=cases.load(op).strategy(subject.claims, (dtype,)))
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return [case for case in found if not subject.refuses(case)]


@pytest.mark.parametrize(
    ("op", "subject", "program"),
    [
        pytest.param(op, subject, program, id=f"{subject.name}-{device}")
        for op, device, subject, program in declared()
    ],
)
def test_a_declared_program_computes_what_is_meant(op, subject, program):
    asked = [case for dtype in subject.dtypes for case in drawn(op, subject, dtype)]
    assert asked
    for case in asked:
        assert dishonest(program, case) is None


LONG = dict(cases.load("sdpa").PINNED)["gpt-oss-decode"]
MATH = sdpa.program(sdpa.TORCH_MATH)


def hiding(name: str) -> Program:
    """A declaration of torch's math kernel with a fault in it."""
    (defect,) = [d for d in defects.load("sdpa") if d.name == name]

    def program(case, inputs, mode):
        other, changed = defect.question(case, inputs) or (case, inputs)
        return MATH(other, changed, mode)

    return program


@pytest.mark.parametrize("name", ["window-plus-one", "last-key-missing", "sink-dropped"])
def test_a_fault_cannot_be_declared_away(name):
    case = replace(LONG, dtype="float32")
    assert dishonest(MATH, case) is None
    assert "the declared arithmetic gives" in (dishonest(hiding(name), case) or "")


@pytest.mark.parametrize("name", ["alibi-ignored", "alibi-of-the-next-head", "alibi-off-by-one"])
def test_a_fault_of_alibi_cannot_be_declared_away(name):
    case = replace(LONG, dtype="float32", alibi=8.0)
    assert dishonest(MATH, case) is None
    assert "the declared arithmetic gives" in (dishonest(hiding(name), case) or "")


def test_a_declaration_without_a_bound_is_none():
    def program(case, inputs, mode):
        out = MATH(case, inputs, mode)
        return {n: MidRad(x.mid, torch.full_like(x.rad, torch.inf)) for n, x in out.items()}

    assert "elements that the dtypes of bfloat16 bound have no declared" in (
        dishonest(program, LONG) or ""
    )


@pytest.mark.parametrize("op", cases.OPS)
def test_the_envelope_itself_is_honest(op):
    for _, case in cases.load(op).PINNED[:4]:
        assert (
            dishonest(lambda case, inputs, mode: programs.envelope(op)(case, inputs, DET), case)
            is None
        )
