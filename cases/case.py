"""One question to put to a subject: small, frozen, printable, and without a single tensor in it."""

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

import torch

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """The base of every op's case.

    A field with a default is an optional feature of the op; setting it switches the feature on.

    dtype: torch name of the format the subject computes in, e.g. "bfloat16".
    seed: of the counter-based stream that every input is made from (`cases.values`).
    """

    op: ClassVar[str]
    dtype: str
    seed: int

    @abstractmethod
    def inputs(self) -> Inputs:
        """The arguments: CPU tensors, the same bytes on every machine."""

    @abstractmethod
    def expected(self, inputs: Inputs) -> Inputs:
        """What the reference says of `inputs`: float64 tensors by output name."""

    @abstractmethod
    def output_dtypes(self) -> Mapping[str, str]:
        """The torch dtype name of every output that the case asks for."""

    @abstractmethod
    def output_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every output that the case asks for."""

    @abstractmethod
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """The name of every axis of every output, in the op's own words: "head", "query row"."""

    def place(self, output: str, where: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Elements of `output` at the indices `where` (one int64 tensor per axis), by name.

        The axes' own names and, where an op packs several things into one axis or counts by
        another number, those too: the request of a packed token, the position, the pair.
        """
        return dict(zip(self.axes()[output], where, strict=True))

    @property
    def structured(self) -> bool:
        """True when the values are not independent draws, so only `det` radii are valid."""
        return False

    @property
    def work(self) -> int:
        """A rough count of multiplications, by which shrinking and budgets compare cases."""
        return 1

    def judged(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        """Per output, a bool mask of the elements that have a meaning; absent: all of them."""
        del inputs
        return {}

    def dead(self, inputs: Inputs) -> Mapping[str, torch.Tensor]:
        """Per output, a bool mask of the elements where nothing was visible (contract: zeros)."""
        del inputs
        return {}

    def anchored(self, inputs: Inputs, observed: Mapping[str, torch.Tensor]) -> Inputs:
        """`inputs`, with the outcome of earlier stages for later ones to be judged on.

        Where an op shows its intermediates, `expected` and the programs start each stage from the
        subject's own input to it, so that a fault is seen where it happens, and undiluted.
        """
        del observed
        return inputs

    def vacuous(self, inputs: Inputs) -> str | None:
        """The feature that this case switches on and cannot show in its output, with the reason."""
        del inputs
        return None

    def wording(self, observed: Mapping[str, torch.Tensor]) -> str | None:
        """A wrong answer in the op's own words, or None: what it amounts to, and by which mistake.

        For what one sentence says better than the worst element, e.g. a whole scale.
        """
        del observed
        return None

    def matches(self, when: Mapping[str, Any]) -> bool:
        """Whether every attribute named in `when` has one of the values given for it.

        A value may be a scalar, a list of scalars, or a table with `min` and/or `max`,
        which what is None does not have.

        Raises:
            ValueError: the case has no such attribute.
        """
        return all(_fits(self._attribute(name), value) for name, value in when.items())

    def _attribute(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self, name):
            raise ValueError(
                f"{name!r} is no attribute of {type(self).__name__}; known: "
                f"{', '.join(f.name for f in fields(self))}"
            )
        return getattr(self, name)

    def features(self) -> frozenset[str]:
        """Names of the optional features that this case uses."""
        return frozenset(
            f.name for f in _optional(type(self)) if getattr(self, f.name) != f.default
        )

    def to_json(self) -> str:
        """One line that `from_json` turns into an equal case; defaults are left out."""
        return self._json

    @functools.cached_property
    def _json(self) -> str:
        values = ((f, getattr(self, f.name)) for f in _fields(type(self)))
        data = {f.name: value for f, value in values if value != f.default}
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The case that `to_json` wrote.

        Raises:
            ValueError: not a JSON object of this case's fields.
        """
        try:
            data = json.loads(text)
            return cls(**{name: _tuples(value) for name, value in data.items()})
        except (TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(
                f"case={text[:200]!r} is not the JSON of a {cls.op} case ({error}); expected "
                f"the fields {', '.join(f.name for f in fields(cls))}"
            ) from error

    @functools.cached_property
    def id(self) -> str:
        """Twelve hex digits that name this case in records, reports and commands."""
        return hashlib.sha256(f"{self.op}:{self.to_json()}".encode()).hexdigest()[:12]


@functools.cache
def _fields(kind: type[Case]) -> tuple[Any, ...]:
    return fields(kind)


@functools.cache
def _optional(kind: type[Case]) -> tuple[Any, ...]:
    return tuple(f for f in fields(kind) if f.default is not MISSING)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if value is None:
            return False
        return wanted.get("min", value) <= value <= wanted.get("max", value)
    if isinstance(wanted, list | tuple):
        return value in wanted
    return value == wanted
