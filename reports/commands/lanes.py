"""`parity lanes`: which lanes this machine has, for which runtime, and why not."""

from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.cells import cells
from harness.lane import LANES, Tier
from harness.machine import presences

_STYLE = {Tier.HARDWARE: "green", Tier.EMULATED: "yellow", Tier.ABSENT: "dim"}


def lanes() -> None:
    """Show how each lane is present here, and why it is emulated or absent."""
    count = Counter((c.subject.runtime, c.lane, c.presence.tier) for c in cells())
    tiers = presences()
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("lane", no_wrap=True)
    table.add_column("runtime", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    table.add_column("cells", justify="right", no_wrap=True)
    table.add_column("reason")
    for lane in LANES:
        for runtime, found in tiers.items():
            here = found[lane.name]
            # A subject may bring its own emulation to a lane that its runtime does not have.
            own = count[runtime, lane.name, Tier.EMULATED] if here.tier is Tier.ABSENT else 0
            able = own or count[runtime, lane.name, here.tier]
            tier = Tier.EMULATED if own else here.tier
            if here.tier is Tier.ABSENT and not able:
                continue
            reason = f"{here.reason}; emulated by the subjects" if own else here.reason
            table.add_row(lane.name, runtime, Text(tier, style=_STYLE[tier]), str(able), reason)
    console = Console(highlight=False)
    console.print(table)
    for lane in LANES:
        console.print(f"{lane.name}: {lane.meaning}")
