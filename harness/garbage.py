"""Python's garbage collector, kept from walking what the engines have imported."""

import gc

ALLOCATIONS = 20_000
"""Objects made after which young garbage is looked for: a case makes a few thousand."""


def settle() -> None:
    """Call it once all is imported: an engine brings a million objects that stay, and to walk
    through them again and again takes a thirtieth of a run."""
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
