"""The witness: the meaning of an op as transformers' own code computes it, in float64.

One module per op, of the same name as the reference it vouches for. Where transformers means
something else, the module says so, and a test shows that it really differs. The only place in
`references` that imports transformers.
"""
