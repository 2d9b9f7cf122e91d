"""vLLM: its CPU attention, its latent attention, its rotary embeddings, its matrix products.

It pins its own torch, so it lives in an environment of its own (`parity env create vllm`); the
files of this folder import it where it runs, inside their calls.
"""

import functools
import importlib
from typing import Any

import torch

REQUIRES = ("vllm",)
LANES = ("cpu", "amx")


@functools.cache
def load() -> None:
    """Import vLLM and the library of kernels for this CPU.

    Its AMX kernels do not ask the system for tiles: in a model the first linear layer has done so,
    through oneDNN. Without that they end in SIGILL.
    """
    torch.cpu._init_amx()
    importlib.import_module("vllm.platforms").current_platform.import_kernels()


@functools.cache
def part(name: str) -> Any:
    """The module vllm.<name>, kernels loaded."""
    load()
    return importlib.import_module(f"vllm.{name}")
