"""Attention kernels and packed products for PyTorch, usable by themselves: they import torch and `arguments` only."""
