"""transformers: its mask functions, its caches, and the attention functions of its models."""

REQUIRES = ("torch", "transformers")
LANES = ("cpu", "mps", "cuda")
