"""Orders: what one process has another do, with its signature. Questions need none.

`Order` travels inside `Signed` as bytes, exactly as they were signed: a receiver that knows fewer
fields than the sender verifies what was said all the same.
"""

from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import Message


class Order(Message, frozen=True, kw_only=True, tag="order.1"):
    """An order and its circumstances, all of them signed."""

    subject: str
    """Where it is said: an order for one is none for another."""
    sender: Incarnation
    role: str
    """The sender's: one of `diptych_identity.roles.Role`."""
    epoch: int
    """Of who leads, where one does: the revision at which it took the lead. Else the sender's."""
    sequence: int
    """Rises with each order of one sender and epoch."""
    issued_unix_ms: int
    """By the bus's clock, which all share."""
    expires_unix_ms: int
    body: bytes
    """The message itself, of a type that `policy.orders` knows."""


class Signed(Message, frozen=True, kw_only=True, tag="signed.1"):
    """An order as it travels."""

    content: bytes
    """An `Order`."""
    credential: str = ""
    """Who the sender is, in its issuer's words: a NATS user token. Public."""
    signature: bytes = b""
    """Of `content`, by the key that `credential` names."""
