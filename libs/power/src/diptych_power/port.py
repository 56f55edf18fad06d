"""The ports: what a worker needs of the device it computes on."""

from dataclasses import dataclass
from typing import Protocol

from diptych_contracts.power import PowerSetPoint


@dataclass(frozen=True, slots=True)
class Reading:
    """A device at one moment."""

    power_w: float
    """Mean over about the last second."""
    energy_j: float
    """Since the start; never falls."""
    cap_w: float
    """In force now."""


class Meter(Protocol):
    """What a device draws."""

    @property
    def energy_source(self) -> str:
        """Where the numbers come from: `sim`, `nvml` or `rapl`."""
        ...

    def read(self, now_s: float) -> Reading:
        """The device now."""
        ...

    def step_energy_j(self, duration_s: float, *, prefill_tokens: int, decode_tokens: int) -> float:
        """Energy of an engine step that has just ended."""
        ...


class CapControl(Protocol):
    """The limits of a device's power, and how to set one."""

    @property
    def cap_min_w(self) -> float:
        """The lowest cap it takes."""
        ...

    @property
    def cap_default_w(self) -> float:
        """The cap it has when nobody governs it; also the highest."""
        ...

    def apply(self, set_point: PowerSetPoint, now_s: float) -> bool:
        """Take a leased cap; False if it was dropped. `read` falls back when the lease is over."""
        ...
