"""What a worker does with each message: say what it is, load an engine, put cases to subjects."""

import importlib
import importlib.metadata
import platform
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

import cases
from harness import call as calling
from harness import garbage, runtimes
from harness.environments import frames, tensors
from harness.environments.source import digest
from harness.lane import LANES
from harness.subject import Subject


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Greet, then answer every message until the stream ends.

    Raises:
        FrameError: what came is no message; nobody is left who could be told.
    """
    frames.write(sink, hello())
    while (frame := frames.read(source.read)) is not None:
        match frame.header["kind"]:
            case "describe":
                frames.write(sink, _tried(lambda f=frame: describe(f.header["engines"])))
            case "load":
                frames.write(sink, _tried(lambda f=frame: _load(**f.header)))
            case "ask":
                for reply, body in answers(frame):
                    frames.write(sink, reply, body)
            case kind:
                frames.write(sink, {"kind": "failed", "why": f"kind={kind!r} is unknown"})


def hello() -> dict[str, Any]:
    """Who answers: the versions that its numbers depend on, and of which checkout it is."""
    return {
        "kind": "hello",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "source": digest(),
    }


def describe(engines: list[str]) -> dict[str, Any]:
    """Versions of the packages behind the engines, and how each runtime finds each lane here."""
    names = importlib.metadata.packages_distributions()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    missing = []
    for engine in engines:
        for package in importlib.import_module(f"harness.engines.{engine}").REQUIRES:
            if package not in names:
                missing.append(package)
            for distribution in names.get(package, ()):
                versions[distribution] = importlib.metadata.version(distribution)
    if missing:
        raise ModuleNotFoundError(f"not installed there: {', '.join(missing)}")
    lanes = {
        runtime: {
            lane.name: {"tier": p.tier.value, "device": p.device, "reason": p.reason}
            for lane in LANES
            if (p := runtimes.presence(runtime, lane.name))
        }
        for runtime in runtimes.NAMES
    }
    return {"kind": "facts", "versions": versions, "lanes": lanes, "host": platform.node()}


def _load(*, module: str, threads: int, **_: Any) -> dict[str, Any]:
    """Import the subjects' module and, by its package's `load`, the engine itself."""
    torch.set_num_threads(threads)
    subjects = importlib.import_module(module).SUBJECTS
    package = importlib.import_module(module.rpartition(".")[0])
    if hasattr(package, "load"):
        package.load()
    garbage.settle()
    return {"kind": "loaded", "subjects": [subject.name for subject in subjects]}


def _tried(action: Any) -> dict[str, Any]:
    try:
        return action()
    except Exception:
        return {"kind": "failed", "why": traceback.format_exc(limit=-3).strip()}


def answers(frame: frames.Frame) -> Iterator[tuple[dict[str, Any], bytes]]:
    """One reply for each case of the message, as soon as it has it."""
    given: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for path, x in tensors.unpack(frame.header["views"], frame.body).items():
        index, _, name = path.partition("/")
        given[index][name] = x
    for i, one in enumerate(frame.header["cases"]):
        reply, body = answer(one, given[str(i)])
        yield {"kind": "answer", "index": i, **reply}, body


def answer(asked: dict[str, Any], inputs: dict[str, torch.Tensor]) -> tuple[dict[str, Any], bytes]:
    """The subject's outputs, or in which way it failed, with its time in milliseconds."""
    spent = [0.0]

    @contextmanager
    def timed() -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            spent[0] += (time.perf_counter() - before) * 1e3

    def failed(how: str, why: str) -> tuple[dict[str, Any], bytes]:
        return {"outcome": how, "why": why, "ms": spent[0]}, b""

    try:
        case = cases.load(asked["op"]).CASE.from_json(asked["case"])
        subject = _subject(asked["module"], asked["subject"])
        got = calling.call(subject, case, inputs, asked["device"], timed, again=asked["again"])
        views, body = tensors.pack(
            {n: x.clone(memory_format=torch.contiguous_format) for n, x in got.items()}
        )
    except calling.Wrong as error:
        return failed("wrong", str(error))
    except calling.Elsewhere as error:
        return failed("elsewhere", str(error))
    except Exception:
        return failed("raised", traceback.format_exc(limit=-3).strip())
    return {"outcome": "answered", "views": views, "ms": spent[0]}, body


def _subject(module: str, name: str) -> Subject:
    found = [s for s in importlib.import_module(module).SUBJECTS if s.name == name]
    if len(found) != 1:
        raise LookupError(f"{module} has {len(found)} subjects named {name!r}, expected one")
    return found[0]
