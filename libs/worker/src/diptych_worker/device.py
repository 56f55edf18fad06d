"""What a worker needs of what it runs on."""

from dataclasses import dataclass
from typing import Protocol

from diptych_engine.port import Engine
from diptych_kvlink.links import LinkAdapter
from diptych_kvtiers.port import Tier
from diptych_power.port import CapControl, Meter


class Device(Meter, CapControl, Protocol):
    """A meter and a cap in one; `energy_source` says whether they are simulated."""


@dataclass(frozen=True, slots=True)
class Equipment:
    """What one worker runs on."""

    engine: Engine
    device: Device
    links: LinkAdapter | None = None
    """Other KV links than this build's own."""
    tiers: tuple[Tier, ...] = ()
    """KV tiers beside those of the settings."""
