"""The harness's end of a worker: it asks in batches, and survives the worker's death."""

import atexit
import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from cases.case import Case, Inputs
from harness.environments import frames, tensors
from harness.environments.process import TROUBLE, Child, Deadline
from harness.environments.source import ROOT, digest

CASE_SECONDS = 60.0
"""For one case; many times what any takes on a slow machine."""
START_SECONDS = 300.0
"""To start, and to import an engine: half a minute where the disk is warm."""
BATCH = 16
"""Cases in one message; their inputs are still in memory when they are judged."""
MOST_BATCH = 8 * 2**20
"""Bytes of inputs after which a message takes no more cases."""
DEATHS = 3
"""Workers lost in a row to one subject, after which it is not asked again."""


class Lost(Exception):
    """The worker died, hung or could not be understood over this case; the others go on."""


class NoWorker(Exception):
    """There is no worker to ask, and asking again would not help."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a subject runs that does not run in this process.

    environment: its name. command: words that start a Python there, without its arguments.
    module: what holds SUBJECTS with the subject, there.
    """

    environment: str
    command: tuple[str, ...]
    module: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One case for one subject. again: also with the path proof, as `harness.call` does it."""

    op: str
    module: str
    subject: str
    case: Case
    device: str
    again: bool


@dataclass(frozen=True, kw_only=True)
class Reply:
    """outcome: answered, wrong, elsewhere or raised. ms: the subject's own time."""

    outcome: str
    ms: float
    why: str = ""
    outputs: Inputs = field(default_factory=dict)


class Worker:
    """The worker of one environment, started when first asked and again after its death.

    command: as in `Place`. case_seconds, start_seconds: after which it counts as hanging.
    """

    def __init__(
        self,
        name: str,
        command: Iterable[str],
        *,
        case_seconds: float = CASE_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.starts = 0
        self._case_seconds, self._start_seconds = case_seconds, start_seconds
        self._child: Child | None = None
        self._loaded: set[str] = set()
        self._planned: list[Request] = []
        self._at: dict[Request, int] = {}
        self._ready: dict[Request, Reply | Lost] = {}
        self._deaths: Counter[str] = Counter()
        self._refusal: str | None = None

    def plan(self, requests: Iterable[Request]) -> None:
        """What will be asked next, in this order, so that it can be sent in batches."""
        self._planned, self._ready = list(requests), {}
        self._at = {request: i for i, request in enumerate(self._planned)}

    def ask(self, request: Request) -> Reply:
        """The answer to one request, which may have come with an earlier one.

        Raises:
            Lost: the worker is gone over it; the next request starts another.
            NoWorker: it can't be started, or was lost too often.
        """
        if request not in self._ready:
            if self._deaths[request.subject] >= DEATHS:
                raise NoWorker(
                    f"the worker of {self.name} was lost {DEATHS} times in a row over "
                    f"{request.subject}, which is not asked again"
                )
            self._exchange(self._batch(request))
        got = self._ready.pop(request)
        if isinstance(got, Lost):
            self._deaths[request.subject] += 1
            raise got
        self._deaths[request.subject] = 0
        return got

    def describe(self, engines: Iterable[str]) -> dict[str, Any]:
        """Facts about the environment: versions, lanes by runtime, host.

        Raises:
            NoWorker: it can't be started, or lacks the engines' packages.
        """
        header = {"kind": "describe", "engines": list(engines)}
        return self._command(self._started(), header, "facts")

    def close(self) -> None:
        """End the process; a later request starts another."""
        if self._child is not None:
            self._child.close()
        self._forget()

    def _batch(self, request: Request) -> list[Request]:
        """`request`, and what is planned after it, up to the size of a message."""
        start = self._at.get(request)
        if start is None:
            return [request]
        batch, size = [], 0
        for planned in self._planned[start : start + BATCH]:
            batch.append(planned)
            size += sum(x.untyped_storage().nbytes() for x in planned.case.inputs().values())
            if size > MOST_BATCH:
                break
        return batch

    def _exchange(self, batch: list[Request]) -> None:
        """Send the batch and keep what comes back; what follows a lost case is sent again later."""
        child = self._started()
        for module in dict.fromkeys(request.module for request in batch):
            self._load(child, module)
        done = 0
        try:
            child.send(*_message(batch), Deadline(self._case_seconds))
            for request in batch:
                frame = child.receive(Deadline(self._case_seconds))
                self._ready[request] = _reply(frame, done)
                done += 1
        except TROUBLE as error:
            self._ready[batch[done]] = Lost(self._ended(child, error))

    def _load(self, child: Child, module: str) -> None:
        if module not in self._loaded:
            header = {"kind": "load", "module": module, "threads": torch.get_num_threads()}
            self._command(child, header, "loaded")
            self._loaded.add(module)

    def _command(self, child: Child, header: dict[str, Any], kind: str) -> dict[str, Any]:
        deadline = Deadline(self._start_seconds)
        try:
            child.send(header, b"", deadline)
            answer = child.receive(deadline).header
        except TROUBLE as error:
            raise self._never(self._ended(child, error)) from error
        if answer.get("kind") != kind:
            what = " ".join((header["kind"], header.get("module", "itself")))
            why = answer.get("why", answer)
            raise self._never(f"the worker of {self.name} can't {what}: {why}")
        return answer

    def _started(self) -> Child:
        if self._refusal is not None:
            raise NoWorker(self._refusal)
        if self._child is not None and self._child.alive:
            return self._child
        self.close()  # if it died, then between two messages, over nobody's case
        command = [*self.command, "-m", "harness.environments.worker"]
        try:
            child = Child(command, ROOT)
        except OSError as error:
            raise self._never(
                f"the worker of {self.name} can't be started: {command[0]}: "
                f"{error.strerror or error}; {self._remedy()}"
            ) from error
        self._child = child
        self.starts += 1
        atexit.register(self.close)
        try:
            hello = child.greeting(Deadline(self._start_seconds))
        except TROUBLE as error:
            raise self._never(f"{self._ended(child, error)}; {self._remedy()}") from error
        if hello.get("source") != digest():
            self.close()
            raise self._never(
                f"the worker of {self.name} runs other files of references, cases or harness "
                f"({hello.get('source')}, here {digest()}): put the same checkout there"
            )
        return child

    def _ended(self, child: Child, error: Exception) -> str:
        said = f"the worker of {self.name} {child.end(error)}"
        self._forget()
        return said

    def _forget(self) -> None:
        self._child, self._loaded = None, set()
        atexit.unregister(self.close)

    def _remedy(self) -> str:
        return f"`parity env list` shows its command, `parity env create {self.name}` makes it anew"

    def _never(self, why: str) -> NoWorker:
        self._refusal = why
        return NoWorker(why)


@functools.cache
def worker(name: str, command: tuple[str, ...]) -> Worker:
    """This process's worker for an environment."""
    return Worker(name, command)


def _message(batch: list[Request]) -> tuple[dict[str, Any], bytes]:
    """Header and body of one message: the inputs of all its cases."""
    given = {
        f"{i}/{name}": x
        for i, request in enumerate(batch)
        for name, x in request.case.inputs().items()
    }
    views, body = tensors.pack(given)
    asked = [
        {
            "op": request.op,
            "module": request.module,
            "subject": request.subject,
            "case": request.case.to_json(),
            "device": request.device,
            "again": request.again,
        }
        for request in batch
    ]
    return {"kind": "ask", "cases": asked, "views": views}, body


def _reply(frame: frames.Frame, index: int) -> Reply:
    """What a frame says in answer to case `index` of a message.

    Raises:
        FrameError: it is the answer to something else.
        ValueError: its tensors can't be read.
    """
    match frame.header:
        case {"kind": "answer", "index": at, "ms": ms, "outcome": "answered", "views": views} if (
            at == index
        ):
            return Reply(outcome="answered", ms=ms, outputs=tensors.unpack(views, frame.body))
        case {"kind": "answer", "index": at, "ms": ms, "outcome": how, "why": why} if at == index:
            return Reply(outcome=how, ms=ms, why=why)
    raise frames.FrameError(f"what is no answer to case {index}: {str(frame.header)[:200]}")
