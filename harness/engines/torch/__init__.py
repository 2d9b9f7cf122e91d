"""PyTorch's own attention kernels."""

REQUIRES = ("torch",)
