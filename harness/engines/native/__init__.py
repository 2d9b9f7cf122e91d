"""Our own production kernels: `torch/` for PyTorch, `mlx/` for MLX, held to everybody's tests.

The files of this folder are the adapters, one per op; the kernels import nothing of the harness.
"""

REQUIRES = ("torch",)
