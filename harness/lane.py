"""Where a subject runs. To add a lane, add a line."""

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """How a lane is present on this machine."""

    HARDWARE = "hardware"
    EMULATED = "emulated"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class Presence:
    """How a runtime finds a lane on this machine.

    device: the runtime's own word for where it runs, e.g. "cpu" or "gpu"; None when absent.
    reason: why the lane is emulated or absent.
    """

    tier: Tier
    device: str | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A kind of hardware, also the name of a pytest marker.

    required: it fails a run in which it was selected and judged too little.
    """

    name: str
    meaning: str
    required: bool = False


LANES = (
    Lane(name="cpu", meaning="ordinary vector instructions", required=True),
    Lane(name="amx", meaning="AMX tiles (CPUID amx_tile and the OS permission)"),
    Lane(name="mps", meaning="Apple Metal; MLX's CPU backend emulates it elsewhere"),
    Lane(name="cuda", meaning="NVIDIA GPUs"),
)
NAMES = tuple(lane.name for lane in LANES)
REQUIRED = tuple(lane.name for lane in LANES if lane.required)
