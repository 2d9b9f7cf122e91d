"""One call of a subject on its device, from CPU tensors to CPU tensors, with its path proof.

Runs in this process or in a worker: imports nothing but the harness and torch.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch

from cases.case import Case, Inputs
from cases.layouts import memory
from harness import contract, runtimes
from harness.subject import Subject

Timed = Callable[[], AbstractContextManager[None]]
"""Opens a context whose wall time is the subject's."""


class Wrong(Exception):
    """The subject answered, and its answer breaks the contract."""


class Elsewhere(Exception):
    """Another kernel ran than the one that was meant."""


class Escaped(Exception):
    """The subject raised what is no Exception, such as a skip of pytest's or SystemExit."""


def call(
    subject: Subject, case: Case, inputs: Inputs, device: str, timed: Timed, *, again: bool
) -> dict[str, torch.Tensor]:
    """What the subject says: outputs by name, on the CPU.

    again: ask twice, the second time with the path proof; both answers must have the same bits.
        Before that the same shapes are asked with other values, every number negated; and the
        second time those tensors are overwritten: what a kernel keeps of an earlier call (a packed
        weight, a table, a workspace), by shape or by address, must not be seen.

    Raises:
        Wrong: the answer breaks the contract.
        Elsewhere: the trace does not show the subject's kernels.
        Exception: whatever the subject raises.
    """
    runtime = runtimes.load(subject.runtime)
    answers = []
    earlier: dict[str, Any] = {}
    if again:
        with runtime.on(device):
            earlier = {name: runtime.send(_negated(x), device) for name, x in inputs.items()}
            with timed():
                _outputs(subject, case, earlier, runtime, device)
    problem = None
    for traced in (False, True)[: 1 + again]:
        with runtime.on(device):
            sent = {
                name: runtime.refill(earlier[name], x, device)
                if traced and earlier
                else runtime.send(x, device)
                for name, x in inputs.items()
            }
            with timed():
                run = _traced if traced else _outputs
                answers.append(run(subject, case, sent, runtime, device))
        if again and not traced:  # it may come in a buffer that the next call fills
            answers[0] = {name: x.clone() for name, x in answers[0].items()}
        after = {name: runtime.fetch(x) for name, x in sent.items()}
        problem = problem or contract.changed(inputs, after)
    problem = contract.broken(case, answers[0]) or problem
    if problem is None and again:
        problem = contract.same(*answers)
    if problem:
        raise Wrong(problem)
    return answers[0]


def _negated(x: torch.Tensor) -> torch.Tensor:
    """The same strides, and every number of the memory negated; positions and masks stay."""
    if not (x.is_floating_point() or x.dtype == torch.int8):
        return x
    return memory(x).neg().as_strided(x.size(), x.stride(), x.storage_offset())


def _outputs(
    subject: Subject, case: Case, sent: dict, runtime: runtimes.Runtime, device: str
) -> dict[str, torch.Tensor]:
    del device  # the tensors are there already
    try:
        with _no_way_out():
            raw = subject.run(case, dict(sent))
        if not isinstance(raw, Mapping):
            raise Wrong(
                f"the subject returned {type(raw).__name__}, expected a dict of "
                f"{', '.join(case.output_dtypes())}"
            )
        return {name: _fetched(runtime, name, x) for name, x in raw.items()}
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # would end the test, the run or the worker without a record
        raise Escaped(f"the subject raised {type(error).__name__}: {error}") from error


@contextmanager
def _no_way_out() -> Iterator[None]:
    """`os._exit`, with which engines answer what they call fatal, would end the run as a success
    without a verdict: here it raises. A child that the subject forks may end by it."""
    leave, mine = os._exit, os.getpid()

    def stay(status: int) -> NoReturn:
        if os.getpid() != mine:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = stay
    try:
        yield
    finally:
        os._exit = leave


def _traced(
    subject: Subject, case: Case, sent: dict, runtime: runtimes.Runtime, device: str
) -> dict[str, torch.Tensor]:
    """The call with its path proof: the kernels that were meant are among those that ran."""
    meant = [name.format(device=device) for name in subject.kernels]
    if not meant:
        return _outputs(subject, case, sent, runtime, device)
    with runtime.trace() as ran:
        got = _outputs(subject, case, sent, runtime, device)
    if missing := [name for name in meant if name not in ran]:
        raise Elsewhere(
            f"{', '.join(missing)} did not run; ran: {', '.join(sorted(ran)) or 'nothing'}"
        )
    return got


def _fetched(runtime: runtimes.Runtime, name: str, x: object) -> torch.Tensor:
    try:
        return runtime.fetch(x)
    except TypeError as error:
        raise Wrong(f"output {name}: {error}") from error
