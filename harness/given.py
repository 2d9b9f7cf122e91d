"""A person's own function as a subject: FILE.py:FUNCTION, called as `harness.signatures` says."""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import cases
from cases.case import Case, Inputs
from harness import runtimes, signatures
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import Mode
from harness.honesty import dishonest
from harness.lane import Presence, Tier
from harness.run import Cell
from harness.signatures import calling
from harness.subject import Program, Subject

DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f32": "float32",
    "half": "float16",
    "float": "float32",
}
"""Short names of formats."""
LANES = {"torch": "cpu", "mlx": "mps"}
"""Where a function of a runtime is judged when nothing else is asked."""


class GivenError(Exception):
    """The function can't be asked; the message says what was found, what is expected, and how."""


class ProgramError(Exception):
    """The declared arithmetic is not one of this op: it raised, or means something else."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a person wants to be judged.

    source, program: "FILE.py:NAME". runtime: whose tensors it takes. lane: where it runs.
    features: what it is asked about; None: all that its parameters allow.
    dtypes: formats by torch's names; () for all floating-point ones of the op.
    """

    source: str
    op: str
    runtime: str = "torch"
    lane: str = ""
    features: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] = ()
    program: str = ""

    def cell(self) -> Cell:
        """The cell that stands for the function.

        Raises:
            GivenError: the file, the function, or what is said of it can't be used.
        """
        where = self.lane or LANES[self.runtime]
        presence = runtimes.presence(self.runtime, where)
        if presence.tier is Tier.ABSENT:
            raise GivenError(
                f"lane={where!r} is absent for {self.runtime}: {presence.reason}; expected one "
                "that `parity lanes` shows as present, with --lane and --runtime"
            )
        function = load(self.source)
        names = taken(self.source, function, self.op)
        claims = self._claims(names)
        module = signatures.load(self.op)
        subject = Subject(
            name=name_of(self.source, self.op),
            run=self._run(function, names, presence),
            runtime=self.runtime,
            lanes=(where,),
            claims=claims,
            dtypes=self._dtypes(),
            programs=self._programs(presence),
            refusal=functools.partial(_refusal, module, frozenset(names), claims),
        )
        return Cell(op=self.op, subject=subject, lane=where, presence=presence)

    def options(self) -> dict[str, str]:
        """What `again` needs besides the source, the case and the lane."""
        words = {"runtime": self.runtime, "program": self.program}
        if self.features is not None:
            words["features"] = ",".join(self.features)
        return {name: word for name, word in words.items() if word}

    @classmethod
    def again(cls, source: str, case: Case, lane: str, options: Mapping[str, str]) -> Self:
        """What was judged when `options` were written, for one case."""
        features = options.get("features")
        return cls(
            source=source,
            op=case.op,
            runtime=options.get("runtime", "torch"),
            lane=lane,
            features=None if features is None else tuple(filter(None, features.split(","))),
            dtypes=(case.dtype,),
            program=options.get("program", ""),
        )

    def _run(self, function: Any, names: tuple[str, ...], presence: Presence) -> Any:
        module = signatures.load(self.op)
        if hasattr(module, "calling"):
            runtime = runtimes.load(self.runtime)
            return module.calling(function, names, runtime, presence.device or "")
        return calling(function, names, module.arguments, module.OUTPUTS)

    def _claims(self, names: tuple[str, ...]) -> frozenset[str]:
        module = signatures.load(self.op)
        able = {feature for name in names for feature in module.PARAMETERS[name].features}
        if self.features is None:
            return module.claimed(frozenset(able))
        for feature in self.features:
            if feature not in able | set(module.FREE):
                by = [n for n, p in module.PARAMETERS.items() if feature in p.features]
                known = sorted({f for p in module.PARAMETERS.values() for f in p.features})
                raise GivenError(
                    f"--features {feature}: "
                    + (
                        f"the function has no parameter {' or '.join(by)}; expected one, for the "
                        "value to be passed: add it, or leave the feature out"
                        if by
                        else f"{self.op} has no such feature for a function; expected some of "
                        f"{', '.join([*known, *module.FREE])}; `parity explain {self.op}` says "
                        "what they mean"
                    )
                )
        return module.claimed(frozenset(self.features))

    def _dtypes(self) -> tuple[str, ...]:
        known = _known_dtypes(self.op)
        for name in self.dtypes:
            if name not in known:
                raise GivenError(
                    f"--dtype {name}: {self.op} is not asked in it; expected one of "
                    f"{', '.join(known)} (bf16, fp16 and fp32 will do)"
                )
        return self.dtypes or tuple(name for name in known if name != "int8")

    def _programs(self, presence: Presence) -> dict[str, Program]:
        if not self.program:
            return {}
        return {presence.device or "": _honest(self.op, self.program, load(self.program))}


def dtype(name: str) -> str:
    """torch's name of a format that may be given by a short one, such as bf16."""
    return DTYPES.get(name, name)


def name_of(source: str, op: str) -> str:
    """The subject's name: "<file>.<op>.<function>"."""
    path, _, function = source.rpartition(":")
    return f"{Path(path).stem}.{op}.{function}"


def load(source: str) -> Callable[..., Any]:
    """The callable that "FILE.py:NAME" names.

    Raises:
        GivenError: there is no such file or name, or the file can't be imported.
    """
    path_, colon, name = source.rpartition(":")
    path = Path(path_)
    if not colon or path.suffix != ".py" or not name.isidentifier():
        raise GivenError(f"{source!r} names no function; expected FILE.py:FUNCTION")
    if not _is_file(path):
        raise GivenError(f"{path} is no file; expected a Python file: check the path")
    module = _imported(path.resolve())
    if not hasattr(module, name):
        defined = sorted(
            key
            for key, x in vars(module).items()
            if callable(x) and getattr(x, "__module__", "") == module.__name__
        )
        raise GivenError(
            f"{path} has no {name!r}; expected one of {', '.join(defined) or 'its functions'}"
            f"{'' if defined else ', and it defines none'}: check the name"
        )
    found = getattr(module, name)
    if not callable(found):
        raise GivenError(f"{source} is a {type(found).__name__}, expected a function")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # longer than a name can be
        return False


def taken(source: str, function: Callable[..., Any], op: str) -> tuple[str, ...]:
    """The arguments of the op that the function has parameters for, in its own order.

    Raises:
        GivenError: it lacks one that is needed, or needs one that the op has not.
    """
    parameters = signatures.load(op).PARAMETERS
    offered = f"{', '.join(parameters)}; `parity explain {op}` says what they are"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise GivenError(
            f"{source} has no signature that Python can read; expected a function with parameters "
            f"among {offered}: wrap it in a def"
        ) from error
    names = []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in parameters and parameter.kind is not parameter.POSITIONAL_ONLY:
            names.append(name)
        elif parameter.default is parameter.empty:
            raise GivenError(
                f"{source} needs an argument {name!r}, which {op} has not; expected some of "
                f"{offered}: rename it or give it a default"
                if name not in parameters
                else f"{source} takes {name!r} by position only, expected by keyword: "
                "take the / out of its parameters"
            )
    if lacking := [n for n, p in parameters.items() if p.needed and n not in names]:
        raise GivenError(
            f"{source} has no parameter {' and '.join(lacking)}; expected some of {offered}: "
            "add what is missing"
        )
    return tuple(names)


def _imported(path: Path) -> ModuleType:
    """The file as a module, with its neighbours in reach, as if run from its folder."""
    name = f"given_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise GivenError(f"{path} can't be imported; expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, or a skip of pytest's
        said = str(error).splitlines()
        raise GivenError(
            f"{path} can't be imported: {type(error).__name__}: {said[0] if said else ''}; "
            "expected a file that `python FILE.py` runs through: mend it"
        ) from error
    return module


def _known_dtypes(op: str) -> Collection[str]:
    return ("bool",) if op == "banded_mask" else cases.load(op).DTYPES


def _refusal(
    module: ModuleType, names: frozenset[str], claims: frozenset[str], case: Any
) -> str | None:
    return module.refusal(case, names, claims)


def _honest(op: str, source: str, program: Any) -> Program:
    """The program, refused where it means something else than the op: that would hide a bug."""

    def run(case: Any, inputs: Inputs, mode: Mode) -> dict[str, MidRad]:
        try:
            said = dishonest(program, case)
            found = program(case, inputs, mode)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, or a skip of pytest's
            raise ProgramError(
                f"--program {source} raised {type(error).__name__}: {error}; expected a function "
                "of (case, inputs, mode) that returns a MidRad for each output"
            ) from error
        if said:
            raise ProgramError(f"--program {source} does not mean {op}: {said}")
        return found

    return run
