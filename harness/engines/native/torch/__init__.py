"""Kernels for PyTorch, usable by themselves: they import torch and `arguments` only."""
