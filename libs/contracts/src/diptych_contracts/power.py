"""Power set-points. They are leased: without a governor a device returns to its default."""

from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import Message


class PowerSetPoint(Message, frozen=True, kw_only=True, tag="power_set_point.1"):
    """Hold `cap_w` until the lease ends."""

    governor: Incarnation
    worker: Incarnation
    sequence: int
    """Rises with each set-point of one governor; an older one is dropped."""
    cap_w: float
    lease_ms: int


class GovernorLease(Message, frozen=True, kw_only=True, tag="governor_lease.1"):
    """Who governs: bucket `leases`, key `governor`. Only one governor acts at a time."""

    governor: Incarnation
