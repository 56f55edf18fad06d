"""A subscription that ends by calling a function."""

from collections.abc import Awaitable, Callable
from typing import Protocol


class Owned(Protocol):
    """A subscription that its bus ends."""

    @property
    def open(self) -> bool:
        """Whether handlers may still be called."""
        ...

    async def close(self) -> None:
        """No handler is called after this."""
        ...


class Stopping:
    """See `port.Subscription`."""

    def __init__(
        self, stop: Callable[[], None], after: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._stop: Callable[[], None] | None = stop
        self._after = after

    @property
    def open(self) -> bool:
        """Whether handlers may still be called."""
        return self._stop is not None

    def stop(self) -> None:
        """No handler is called after this."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    async def close(self) -> None:
        """No handler is called after this."""
        self.stop()
        if self._after is not None:
            await self._after()
