"""mlx-lm: its masks, its caches, and the attention call that its models share (package mlx_lm)."""

REQUIRES = ("mlx", "mlx_lm")
LANES = ("mps",)
