"""Settings of the power governor."""

from dataclasses import dataclass

from diptych_chassis.settings import ServiceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorSettings(ServiceSettings):
    """`DIPTYCH_POWER_GOVERNOR__<NAME>`."""

    budget_w: float | None = None
    """For all devices together; None leaves each at its default cap."""
    tick_s: float = 1.0
    """How often it spreads the budget."""
    lease_s: float = 10.0
    """How long a set-point holds; without a governor a device is back at its default after it."""

    def __post_init__(self) -> None:
        if self.budget_w is not None and self.budget_w <= 0:
            raise ValueError(f"BUDGET_W must be positive, got {self.budget_w:g}")
        if not 0 < 3 * self.tick_s <= self.lease_s:
            raise ValueError(
                f"LEASE_S ({self.lease_s:g}) must be at least three times TICK_S ({self.tick_s:g})"
            )
