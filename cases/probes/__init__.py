"""Exact probes: inputs from whose answer one reads what a kernel did, and the reading of it.

A probe is a case like any other whose `values` are one of the op's probing fills: values that name
the key, page or element that they stand in, and queries that weigh all keys alike or by a known
ladder. `cases/probes/<op>.py` offers

    FILLS                       the probing fills of the op; none where every case is read back
    fits(case)                  whether there is a name for everything that is to be read
    first(claims, dtypes)       the probes with which a search begins
    read(case, inputs, observed)
                                what a wrong answer amounts to, in a sentence; None: not readable
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from cases.case import Case, Inputs


def load(op: str) -> ModuleType:
    """The module `cases.probes.<op>`."""
    return importlib.import_module(f"cases.probes.{op}")


def first(op: str, claims: frozenset[str], dtypes: tuple[str, ...]) -> tuple[Case, ...]:
    """The probes with which a search begins: few, small, and using only claimed features."""
    return tuple(case for case in load(op).first(claims, dtypes) if case.features() <= claims)


def alike(case: Case) -> dict[str, Case]:
    """The probes of the same shape and features as `case`, by their fill; none if it has more
    keys than a probe has names for."""
    module = load(case.op)
    fills: list[dict[str, Any]] = [{"values": fill} for fill in module.FILLS]
    return {f["values"]: replace(case, **f) for f in fills} if module.fits(case) else {}


def read(case: Case, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> str | None:
    """What the wrong answer to a probe amounts to: which keys a row sees, which element lands.

    observed: the outputs that are wrong. None where the case is no probe, or nothing can be read.
    """
    return load(case.op).read(case, inputs, observed)
