"""MLX's own fused attention (package mlx): Metal where there is some, else its CPU graph."""

REQUIRES = ("mlx",)
LANES = ("mps",)
