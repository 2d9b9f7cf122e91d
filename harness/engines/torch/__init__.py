"""PyTorch's own attention kernels and matrix products."""

REQUIRES = ("torch",)
