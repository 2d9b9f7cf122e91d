"""The text of a repro script: inputs written down, the subject's call, and what it must answer."""

import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from cases.case import Case, Inputs
from harness import programs, runtimes
from harness.arithmetic.formats import FORMATS, round_to
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import DET, PROB
from harness.compare import compare
from harness.record import Record
from harness.run import Cell, answer
from reports.repro import literals, standalone
from reports.repro.bundle import Bundle
from reports.repro.standalone import Allowed

MOST = 20_000
"""Numbers that a script may hold."""

HEAD = '''\
"""{subject} answers a case of {op} wrong.

{why}

Case {id}: {case}
Seen with {versions}.
Needs {needs}, and nothing else; exit code 1 while the answer is wrong.
"""

from __future__ import annotations

import sys
from math import inf, nan
from types import SimpleNamespace

import torch
from torch import Tensor  # torch evaluates the annotations of its operators here

'''

BODY = """

# The case, as far as the call asks for it.
repro_case = {case}

# What the call is given: the very values, and their places in memory.
repro_inputs = {{
{inputs}
}}

# What the reference says, and what a right kernel may answer.
repro_allowed = {{
{allowed}
}}


def repro_call():
    with {runtime}.on({device!r}):
        sent = {{name: {runtime}.send(x, {device!r}) for name, x in repro_inputs.items()}}
        answer = ({run})(repro_case, dict(sent))
        return [{{name: {runtime}.fetch(x) for name, x in part.items()}} for part in (answer, sent)]


if __name__ == "__main__":
    sys.exit({standalone}.main(repro_call, repro_inputs, repro_allowed, {fault!r}))
"""

LOAD = '''

def repro_load(path, name):
    """A function of a person's own file, with its neighbours in reach."""
    import importlib.util
    import os

    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("repro_given", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["repro_given"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
'''


class TooLarge(Exception):
    """The case holds more numbers than a script should."""


def write(case: Case, cell: Cell, record: Record, source: str, versions: Mapping[str, Any]) -> str:
    """The script for a case that `cell` answers as `record` says.

    source: "FILE.py:FUNCTION" of a person's own function, which the script loads; "" else.

    Raises:
        TooLarge: the case is not small. BundleError: the call can't be written down.
    """
    inputs = case.inputs()
    allowed = bounds(case, cell, inputs)
    held = sum(map(literals.size, inputs.values()))
    held += sum(3 * right.low.numel() for right in allowed.values())
    if held > MOST:
        raise TooLarge(f"case {case.id} holds {held} numbers, a script at most {MOST}")
    run, runtime = cell.subject.run, runtimes.load(cell.subject.runtime)
    loaded = _loaded(run, source)
    bundle = Bundle(_module(run), loaded)
    run_text = bundle.expression(run)
    runtime_text = bundle.expression(runtime)
    judge_text = bundle.expression(standalone)
    bundle.attributes |= {"on", "send", "fetch", "main", "Allowed"}
    modules, statements = bundle.modules(), bundle.statements()
    names = [n for n in sorted(bundle.attributes) if not n.startswith("_") and n not in _TENSORS]
    used = dict.fromkeys(("torch", cell.subject.runtime, cell.subject.engine.replace("_", "-")))
    packages = [name for name in used if versions.get(name)]
    head = HEAD.format(
        subject=cell.name,
        op=case.op,
        why=_comment(record.why),
        id=case.id,
        case=_comment(case.to_json()),
        versions=", ".join(f"{name} {versions[name]}" for name in ("python", *packages)),
        needs=" and ".join([*packages, *([source.rpartition(":")[0]] if source else [])]),
    )
    body = BODY.format(
        case=literals.namespace(case, [n for n in names if hasattr(case, n)], "    "),
        inputs=_entries({name: literals.tensor(x) for name, x in inputs.items()}),
        allowed=_entries({n: _allowed(judge_text, right) for n, right in allowed.items()}),
        runtime=runtime_text,
        device=cell.presence.device,
        run=run_text,
        standalone=judge_text,
        fault=record.why.split("; ")[0] if record.fault else "",
    )
    text = head + (LOAD if loaded else "") + f"\n{modules}\n\n{statements}\n" + body
    return re.sub(r"\n{4,}", "\n\n\n", text)


_TENSORS = frozenset({"inputs", "expected", "judged", "dead", "to_json", "from_json"})
"""Attributes of a case that no call asks for, and that cost time or space."""


def bounds(case: Case, cell: Cell, inputs: Inputs) -> dict[str, Allowed]:
    """The least and the greatest value that a right kernel may answer, element by element.

    Stages are judged from the inputs alone; where a fault shows only in a stage that starts from
    what was observed before it, from there.
    """
    mode, keep = DET if case.structured else PROB, dict(case.judged(inputs))
    program = cell.program(case, inputs, mode)
    try:
        observed = answer(case, inputs, cell)
    except Exception:  # it raises or breaks the contract: the script shows that
        return _bounds(case, program, keep)
    if compare(observed, program, keep).allowed:
        program = cell.program(case, case.anchored(inputs, observed), mode)
    if compare(observed, program, keep).allowed:
        program = programs.envelope(case.op)(case, case.anchored(inputs, observed), DET)
    return _bounds(case, program, keep)


def _bounds(
    case: Case, program: Mapping[str, MidRad], keep: Mapping[str, torch.Tensor]
) -> dict[str, Allowed]:
    out = {}
    for name, dtype in case.output_dtypes().items():
        mid, rad = program[name].mid, program[name].rad
        # One step further out, so that at a tie both neighbours are allowed, as when judging.
        low = torch.nextafter(mid - rad, torch.tensor(-torch.inf, dtype=torch.float64))
        high = torch.nextafter(mid + rad, torch.tensor(torch.inf, dtype=torch.float64))
        if dtype in FORMATS:
            low, high = (round_to(x, FORMATS[dtype]) for x in (low, high))
        else:
            low, high = (mid - rad).ceil(), (mid + rad).floor()
        undefined = mid.isnan() | rad.isnan()
        low, high = low.masked_fill(undefined, torch.inf), high.masked_fill(undefined, -torch.inf)
        meaningless = rad.isinf()
        if name in keep:
            meaningless = meaningless | ~keep[name]
        out[name] = Allowed(
            dtype=dtype, expected=mid, low=low.masked_fill(meaningless, torch.nan), high=high
        )
    return out


def _loaded(run: Any, source: str) -> dict[int, str]:
    """How the script comes by a person's own function: it loads the file."""
    if not source:
        return {}
    path, _, name = source.rpartition(":")
    function = inspect.getclosurevars(run).nonlocals.get("function")
    if function is None:  # kept by an inner function
        inner = [x for x in inspect.getclosurevars(run).nonlocals.values() if callable(x)]
        return {key: text for x in inner for key, text in _loaded(x, source).items()}
    return {id(function): f"repro_load({path!r}, {name!r})"}


def _module(run: Any) -> ModuleType:
    """The module that a subject's call comes from."""
    while isinstance(run, functools.partial):
        run = run.func
    assert isinstance(run, FunctionType), run
    return sys.modules[run.__globals__["__name__"]]


def _allowed(standalone_: str, right: Allowed) -> str:
    parts = {
        n: literals.tensor(getattr(right, n).contiguous()) for n in ("expected", "low", "high")
    }
    inner = "".join(f"    {name}={text},\n" for name, text in parts.items())
    return f"{standalone_}.Allowed(\n    dtype={right.dtype!r},\n{inner})"


def _entries(parts: Mapping[str, str]) -> str:
    return "\n".join(textwrap.indent(f"{name!r}: {text},", "    ") for name, text in parts.items())


def _comment(text: str) -> str:
    """Text that may stand in a docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''")
