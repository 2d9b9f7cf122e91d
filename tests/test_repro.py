"""Repro scripts on trial: each runs without this project, and fails as the harness said."""

import contextlib
import functools
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import cases
from cases.case import Case
from harness import known, machine
from harness.arithmetic.verdict import excess
from harness.cells import KNOWN, cells
from harness.lane import Tier
from harness.power import planted
from harness.record import BAD, Record, Status
from harness.run import Cell, ask
from reports.repro import literals, script
from reports.repro.bundle import Bundle, BundleError

VERSIONS = machine.versions()
PRESENT = {
    cell.subject.name: cell
    for cell in cells()
    if cell.presence.tier is not Tier.ABSENT and not cell.subject.slow and cell.place is None
}
"""One cell of each subject that runs here in this process."""
CLEAN = """
import contextlib, io, json, runpy, sys, traceback
for name in ("references", "cases", "harness", "reports", "tests"):
    sys.modules[name] = None  # whoever imports it fails
for path in sys.argv[1:]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
        code = None
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        code = traceback.format_exc()
    print(json.dumps([path, code, out.getvalue()]))
"""


def run(folder: Path, scripts: list[Path]) -> dict[str, tuple[object, str]]:
    """Exit code (or traceback) and output of each script, all in one clean process."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", CLEAN, *map(str, scripts)],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return {Path(path).stem: (code, said) for path, code, said in rows}


def drawn(cell: Cell) -> Iterator[Case]:
    """Small cases that the subject answers, those with many features first."""
    found: list[Case] = []

    @seed(3)
    @settings(
        max_examples=120, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )  # fmt: skip
    @given(case=cases.load(cell.op).strategy(cell.subject.claims, cell.subject.dtypes))
    def draw(case):
        found.append(case)

    draw()
    asked = (c for c in found if c.work < 30_000 and not cell.subject.refuses(c))
    return iter(sorted(asked, key=lambda case: -len(case.features())))


def right(cell: Cell) -> tuple[Case, Record]:
    """A case that the subject answers right."""
    for case in drawn(cell):
        if sum(map(literals.size, case.inputs().values())) > 4000:
            continue
        record = ask(case, cell)
        if record.status is Status.AGREE:
            return case, record
    raise AssertionError(f"{cell.name} has no small case")


FAULT = """
right_call = repro_call


def repro_call():
    answer, sent = right_call()
    return {n: ~x if x.dtype == torch.bool else x + 1 for n, x in answer.items()}, sent


if __name__"""


def test_a_known_divergence_shows_with_the_engine_alone(tmp_path):
    scripts = []
    for entry in known.load(KNOWN):
        for cell in PRESENT.values():
            if entry.covers(cell.subject.name, cell.presence.device, entry.pinned):
                record = ask(entry.pinned, cell)
                scripts.append(tmp_path / f"{entry.id}.{cell.subject.name}.py")
                scripts[-1].write_text(script.write(entry.pinned, cell, record, "", VERSIONS))
    assert len(scripts) >= 20
    for name, (code, said) in run(tmp_path, scripts).items():
        assert code == 1, f"{name}: {code} {said}"
        assert "  observed " in said
        assert "  expected " in said


def test_every_subject_can_be_written_down():
    for cell in PRESENT.values():
        bundle = Bundle(script._module(cell.subject.run))
        assert bundle.expression(cell.subject.run), cell.name
        bundle.modules()
        assert "SUBJECTS" not in bundle.statements(), cell.name


ONE_OF_EACH = {
    (cell.subject.engine, cell.op): cell
    for cell in sorted(PRESENT.values(), key=lambda cell: "tdp" in cell.name)
}
"""A subject of each engine and op; of our bmm one whose kernels are registered with torch."""


def test_a_right_answer_passes_and_a_wrong_one_fails_for_each_engine_and_op(tmp_path):
    scripts = []
    for (engine, op), cell in ONE_OF_EACH.items():
        case, record = right(cell)
        text = script.write(case, cell, record, "", VERSIONS)
        for kind, said in (("right", text), ("wrong", text.replace("\nif __name__", FAULT))):
            scripts.append(tmp_path / f"{kind}-{engine}-{op}.py")
            scripts[-1].write_text(said)
    found = run(tmp_path, scripts)
    assert len(found) == len(scripts) >= 15
    for name, (code, said) in found.items():
        if name.startswith("right"):
            assert code == 0, f"{name}: {code} {said}"
            assert "every element is right" in said
        else:
            assert code == 1, f"{name}: {code} {said}"
            assert "  observed " in said
            assert "  expected " in said


CASE = cases.load("sdpa").CASE(
    dtype="bfloat16", seed=0, values="normal", batch=2, q_len=1, kv_len=3, heads=1, kv_heads=1,
    head_dim=8, kv_lens=(3, 1), layout="sliced",
)  # fmt: skip


def math(run) -> Cell:
    return replace(
        PRESENT["torch.sdpa.math"],
        subject=replace(PRESENT["torch.sdpa.math"].subject, run=run),
    )


def flip(case, t):
    return {"out": -t["q"]}


def writes(case, t):
    t["q"] += 1
    return {"out": t["q"]}


def raises(case, t):
    raise RuntimeError("no such kernel")


def shape(case, t):
    return {"out": t["q"][:1]}


@pytest.mark.parametrize(
    ("run_", "said"),
    [
        (flip, "out: 16 of 16 elements are wrong"),
        (writes, "the call changed its input q"),
        (shape, "out has shape [1, 1, 1, 8], expected [2, 1, 1, 8]"),
        (lambda case, t: {}, "output out is NoneType, expected a tensor"),
        (lambda case, t: {"out": t["q"].float()}, "out has dtype torch.float32, expected torch.bf"),
    ],
    ids=["flip", "writes", "shape", "nothing", "dtype"],
)
def test_what_is_wrong_is_said(run_, said):
    """In this process: nothing is imported anew."""
    cell = math(run_)
    record = ask(CASE, cell)
    assert record.status in BAD
    code, printed = _here(script.write(CASE, cell, record, "", VERSIONS))
    assert code == 1
    assert said.replace("torch.bf", "torch.bfloat16") in printed


def test_what_the_subject_raises_is_raised():
    cell = math(raises)
    text = script.write(CASE, cell, ask(CASE, cell), "", VERSIONS)
    with pytest.raises(RuntimeError, match="no such kernel"):
        _here(text)


def _here(text: str) -> tuple[object, str]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(text, "repro.py", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        return stop.code, out.getvalue()
    raise AssertionError("the script did not end by sys.exit")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "bool", "int64", "int32"])
def test_a_tensor_reads_back_to_the_bit(dtype):
    x = torch.tensor([0.0, -0.0, 1 / 3, -7.25, 1e-40, 65504.0, 2.0**-24, 3.0])
    if dtype.startswith("float") or dtype == "bfloat16":
        x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan, 0.1])])
    x = x.to(getattr(torch, dtype)).reshape(-1, 4)
    for form in (x, x.T, x[1:, 1:3], x[:1].expand(3, 4)):
        y = eval(literals.tensor(form), {"torch": torch, "inf": float("inf"), "nan": float("nan")})
        assert (y.shape, y.stride(), y.dtype) == (form.shape, form.stride(), form.dtype)
        assert torch.equal(y.nan_to_num(7), form.nan_to_num(7))
        real = ~form.isnan()
        assert torch.equal(y.signbit() & real, form.signbit() & real)
        assert y.untyped_storage().nbytes() == form.untyped_storage().nbytes()


def test_bounds_allow_what_the_harness_allows_and_no_more():
    """The widest answers inside pass, their outer neighbours do not: element by element."""
    cell = PRESENT["torch.sdpa.math"]
    inputs = CASE.inputs()
    allowed = script.bounds(CASE, math(flip), inputs)["out"]
    program = cell.program(CASE, inputs, planted.mode(CASE))["out"]
    for edge, away in ((allowed.low, -torch.inf), (allowed.high, torch.inf)):
        inside = edge.to(torch.bfloat16)
        outside = torch.nextafter(inside, torch.tensor(away, dtype=torch.bfloat16))
        assert bool((excess(inside, program) <= 1).all())
        assert bool((excess(outside, program) > 1).all())


def test_a_large_case_is_refused():
    case = replace(CASE, kv_len=3000, kv_lens=(3000, 1))
    with pytest.raises(script.TooLarge, match="a script at most 20000"):
        script.write(case, math(flip), ask(CASE, math(flip)), "", VERSIONS)


def test_a_call_without_a_name_is_refused():
    made = functools.reduce(lambda f, g: g, [flip, type("Call", (), {"__call__": flip})()])
    with pytest.raises(BundleError):
        Bundle(sys.modules[__name__]).expression(made)
