"""Attention kernels for MLX, usable by themselves: they import mlx and `arguments` only."""
