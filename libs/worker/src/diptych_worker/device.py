"""What a worker needs of the device it runs on."""

from typing import Protocol

from diptych_power.port import CapControl, Meter


class Device(Meter, CapControl, Protocol):
    """A meter and a cap in one; `energy_source` says whether they are simulated."""
