"""Values written down as Python source that makes them again, to the bit."""

import inspect
import math
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from cases.layouts import memory


class NotPlain(Exception):
    """The value has no short source."""


def plain(value: Any) -> str:
    """The source of plain data: numbers, text, containers of them, and records of them.

    A dataclass becomes a SimpleNamespace of its fields and properties.

    Raises:
        NotPlain: there is none.
    """
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(plain, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, frozenset | set):
        return f"frozenset([{', '.join(sorted(map(plain, value)))}])"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{plain(k)}: {plain(v)}' for k, v in value.items())}}}"
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value)]
        names += [n for n, x in vars(type(value)).items() if isinstance(x, property)]
        return namespace(value, names)
    raise NotPlain(f"{type(value).__name__} is no plain data")


def namespace(value: Any, names: Collection[str], indent: str = "") -> str:
    """A SimpleNamespace with these attributes of `value`; methods give what they give now.

    What is not plain, or needs an argument, is left out.
    """
    parts = []
    for name in names:
        try:
            found = getattr(value, name)
            if callable(found):
                inspect.signature(found).bind()
                parts.append(f"{name}=lambda: {plain(found())}")
            else:
                parts.append(f"{name}={plain(found)}")
        except (NotPlain, TypeError):
            continue
    if not indent:
        return f"SimpleNamespace({', '.join(parts)})"
    return f"SimpleNamespace(\n{''.join(f'{indent}{part},' + chr(10) for part in parts)})"


def number(x: float) -> str:
    """A float that reads back to the same value; inf and nan as the names of `math`."""
    if math.isnan(x):
        return "nan"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return repr(x)


def tensor(x: torch.Tensor) -> str:
    """The source of a CPU tensor: values, dtype, strides, and what lies in the gaps."""
    flat = memory(x)
    plain_ = x.is_contiguous() and x.storage_offset() == 0 and flat.numel() == x.numel()
    values = flat.double() if x.is_floating_point() else flat
    words = [number(v) if isinstance(v, float) else repr(v) for v in values.tolist()]
    lines = textwrap.fill(", ".join(words), 92, break_long_words=False, break_on_hyphens=False)
    made = f"torch.tensor([\n{textwrap.indent(lines, '    ')}\n], dtype={x.dtype})"
    if plain_:
        return f"{made}.reshape({tuple(x.shape)})"
    return f"{made}.as_strided({tuple(x.shape)}, {x.stride()}, {x.storage_offset()})"


def size(x: torch.Tensor) -> int:
    """How many numbers `tensor` writes down."""
    return x.untyped_storage().nbytes() // x.element_size()
