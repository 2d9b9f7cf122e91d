"""A subject: one production call of an engine for an op, what it claims, and its arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cases.case import Case, Inputs
from harness.arithmetic.midrad import MidRad
from harness.arithmetic.mode import Mode

Tensors = dict[str, Any]
"""Tensors of the subject's own runtime, by name."""

Program = Callable[[Any, Inputs, Mode], dict[str, MidRad]]
"""Declared arithmetic: (case, inputs, mode) to what each output may be."""


def _never(case: Any) -> str | None:
    del case
    return None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One production call.

    name: "<engine>.<op>.<variant>", unique.
    run: (case, tensors of the runtime) to outputs by name. The call alone: no rounding, no repair.
    runtime: the module of `harness.runtimes` whose tensors it takes.
    lanes: where it can run at all.
    claims: optional case fields it supports; a case that uses another is refused.
    dtypes: torch names of the formats it supports.
    programs: its arithmetic, by the runtime's device name; the op's envelope elsewhere.
    refusal: a reason not to ask this case, for what claims can't say; never inferred from a raise.
    kernels: names that the runtime's trace must show, or the case is an error: the path proof.
        "{device}" in a name stands for the runtime's device.
    emulated: lanes whose emulation is in the subject itself (e.g. software tiles).
    slow: each new shape costs seconds (compilation); judged with few examples.
    """

    name: str
    run: Callable[[Any, Tensors], Tensors]
    claims: frozenset[str]
    dtypes: tuple[str, ...]
    runtime: str = "torch"
    lanes: tuple[str, ...] = ("cpu",)
    programs: Mapping[str, Program] = field(default_factory=dict)
    refusal: Callable[[Any], str | None] = _never
    kernels: tuple[str, ...] = ()
    emulated: frozenset[str] = frozenset()
    slow: bool = False

    @property
    def engine(self) -> str:
        return self.name.split(".", 1)[0]

    def refuses(self, case: Case) -> str | None:
        """Why this case is not a question for this subject, or None."""
        if case.dtype not in self.dtypes:
            return f"{case.dtype} is not supported"
        if extra := case.features() - self.claims:
            return f"{', '.join(sorted(extra))} not claimed"
        return self.refusal(case)
