"""How wrong a correct kernel may be: midpoint-radius arithmetic, imports torch only."""
