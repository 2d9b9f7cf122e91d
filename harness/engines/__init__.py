"""Packages with production code: one folder each, one file per op that it has. The tree registers.

An engine's file offers SUBJECTS. An engine whose packages are not installed is absent, with the
reason; an engine that is installed and can't be imported is a fault of the adapter and raises.
"""

import importlib
import importlib.util
import pkgutil
from functools import cache
from types import ModuleType

import cases
from harness.subject import Subject

NAMES = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg))


class EngineError(Exception):
    """An engine's folder does not do what the tree promises."""


@cache
def ops(engine: str) -> tuple[str, ...]:
    """The ops that the engine has a file for.

    Raises:
        ValueError: no such engine.
        EngineError: a file has the name of no op: nobody would ever ask it anything.
    """
    if engine not in NAMES:
        raise ValueError(f"engine={engine!r} is unknown; expected one of {', '.join(NAMES)}")
    package = _package(engine)
    found = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg)
    if strays := [name for name in found if name not in cases.OPS]:
        raise EngineError(
            f"harness/engines/{engine}/{strays[0]}.py is named after no op; expected one of "
            f"{', '.join(cases.OPS)}: rename it, or move what is no adapter into a folder"
        )
    return tuple(found)


def absent(engine: str) -> str | None:
    """Why the engine can't be asked here, or None: the packages it REQUIRES are not installed."""
    package = _package(engine)
    missing = [name for name in package.REQUIRES if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def lanes(engine: str) -> tuple[str, ...]:
    """The lanes that the engine would serve if it were installed: its LANES, else cpu."""
    return getattr(_package(engine), "LANES", ("cpu",))


@cache
def subjects(engine: str, op: str) -> tuple[Subject, ...]:
    """The engine's subjects for `op`; none when it has no such file.

    Raises:
        EngineError: the file can't be imported or does not offer subjects.
    """
    if op not in ops(engine):
        return ()
    where = f"harness/engines/{engine}/{op}.py"
    module = _imported(engine, f".{op}", where)
    found = getattr(module, "SUBJECTS", ())
    if not found or not all(isinstance(s, Subject) for s in found):
        raise EngineError(f"{where} must offer SUBJECTS, a tuple of at least one Subject")
    for subject in found:
        if subject.engine != engine:
            raise EngineError(f"{where}: the name {subject.name!r} must begin with {engine!r}")
    return tuple(found)


def _package(engine: str) -> ModuleType:
    return _imported(engine, "", f"harness/engines/{engine}/__init__.py")


def _imported(engine: str, module: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(f"harness.engines.{engine}{module}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a skip of pytest's would leave out the op, and pass
        raise EngineError(
            f"{where} can't be imported: {type(error).__name__}: {error}; mend the adapter, or "
            f"pin the version of {engine} that it was written for"
        ) from error
