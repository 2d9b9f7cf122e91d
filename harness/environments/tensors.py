"""Tensors as safetensors bytes, with their strides and what lies in the gaps between."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save

View = tuple[str, str, int, list[int], list[int]]
"""Storage, dtype, offset, size and stride of one tensor, in elements."""


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, View], bytes]:
    """Views by tensor name and the bytes of every distinct storage, whole.

    Raises:
        ValueError: a tensor that is no plain CPU memory.
    """
    views: dict[str, View] = {}
    storages: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for name, x in tensors.items():
        if x.device.type != "cpu" or x.layout != torch.strided:
            raise ValueError(
                f"{name} is a {x.layout} tensor on {x.device}, expected a strided one on the cpu"
            )
        storage = x.untyped_storage()
        key = names.setdefault(storage.data_ptr(), str(len(names)))
        storages[key] = torch.empty(0, dtype=torch.uint8).set_(storage)
        dtype = str(x.dtype).removeprefix("torch.")
        views[name] = (key, dtype, int(x.storage_offset()), list(x.size()), list(x.stride()))
    return views, save(storages)


def unpack(views: Mapping[str, Any], body: bytes) -> dict[str, torch.Tensor]:
    """The tensors that `pack` took: equal values, dtypes, strides and gaps.

    Raises:
        ValueError: the views do not fit the bytes.
    """
    try:
        storages = load(body)
        return {
            name: torch.empty(0, dtype=getattr(torch, dtype)).set_(
                storages[key].untyped_storage(), offset, size, stride
            )
            for name, (key, dtype, offset, size, stride) in views.items()
        }
    except Exception as error:  # safetensors' own, or torch's for a view out of bounds
        raise ValueError(f"tensors that can't be read: {type(error).__name__}: {error}") from error
