"""What WebSockets have sent of messages that nobody has taken yet: bounded over all of them."""

from typing import Protocol


class Sender(Protocol):
    """A connection."""

    def give_way(self) -> None:
        """Be closed: it holds more than there is room for."""
        ...


class Unfinished:
    """Bytes by connection. Beyond the limit the one that has taken longest gives way.

    Args:
        limit_bytes: Most bytes of all connections together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes: dict[Sender, int] = {}
        self.total_bytes = 0

    def grown(self, sender: Sender, n_bytes: int) -> None:
        """`sender` has sent more."""
        self._bytes[sender] = self._bytes.get(sender, 0) + n_bytes
        self.total_bytes += n_bytes
        while self.total_bytes > self._limit_bytes:
            oldest = next(iter(self._bytes))
            self.taken(oldest)
            oldest.give_way()

    def taken(self, sender: Sender) -> None:
        """What `sender` sent was taken, or is gone."""
        self.total_bytes -= self._bytes.pop(sender, 0)
