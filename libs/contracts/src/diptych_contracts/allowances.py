"""What is left of a limit that several gateways share: bucket `allowances`, one record per limit.

A gateway does not write for every request: it takes a share for about a second out of the record,
spends that by itself, and brings back what it does not need (`policy.allowances`).
"""

from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import Message


class Places(Message, frozen=True, kw_only=True, tag="places.1"):
    """How many requests at once a gateway may have; it says so again while it has any."""

    gateway: Incarnation
    count: int
    unix_ms: int
    """When it last said so."""


class Allowance(Message, frozen=True, kw_only=True, tag="allowance.1"):
    """What no gateway has taken; key = that of the key or tenant in bucket `keys`."""

    requests: float = 0.0
    tokens: float = 0.0
    at_unix_ms: int
    """When that was so, by the server's clock: it has refilled since."""
    places: tuple[Places, ...] = ()
