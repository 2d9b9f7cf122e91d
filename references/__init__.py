"""What each op means, in plain PyTorch float64.

One module per op; its docstring is the contract. Nothing here imports the rest of the project, and
only `references.hf`, the witness, imports transformers.
"""
