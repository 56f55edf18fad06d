"""Bodies on their way in: how many are read at once, and on which thread they are judged."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

from starlette.types import Receive

from diptych_gateway.listening.reading import Grown, read_json_body

SMALL_BYTES = 64 * 1024
"""Up to this, about 3 ms of decoding and checking, the event loop does it itself."""
_FULL_BODIES = 32
"""Memory for bodies that are being read, in bodies of the largest size."""

T = TypeVar("T")


class Intake:
    """Reads bodies before their requests take a place, so that slow ones hold none.

    When too many are being read, or they take too much memory, the one that has taken longest
    gives way: a body that comes at an ordinary speed is never the oldest for long.

    Args:
        executor: Judges large bodies.
        max_bodies: Most bodies being read at once.
        max_bytes: Largest body.
        timeout_s: Longest time for one.
    """

    def __init__(
        self, executor: Executor, *, max_bodies: int, max_bytes: int, timeout_s: float
    ) -> None:
        self._executor = executor
        self._max_bodies = max_bodies
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._reading: dict[asyncio.Timeout, int] = {}
        self._bytes = 0

    @property
    def reading(self) -> int:
        """How many bodies are being read."""
        return len(self._reading)

    async def read(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
        """A whole JSON body. Raises what `read_json_body` raises."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            return await read_json_body(
                headers, receive, max_bytes=self._max_bytes, limit=limit, grown=self._grown(limit)
            )
        finally:
            self._forget(limit)

    async def judged(self, size: int, judge: Callable[[], T]) -> T:
        """What `judge` makes of a body of `size` bytes, with the event loop free if it is large."""
        if size <= SMALL_BYTES:
            return judge()
        return await asyncio.get_running_loop().run_in_executor(self._executor, judge)

    def _grown(self, limit: asyncio.Timeout) -> Grown:
        def grown(size: int) -> None:
            self._bytes += size - self._reading.get(limit, 0)
            self._reading[limit] = size
            self._make_room()

        return grown

    def _make_room(self) -> None:
        most = _FULL_BODIES * self._max_bytes
        while len(self._reading) > self._max_bodies or self._bytes > most:
            oldest = next(iter(self._reading))
            self._forget(oldest)
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())

    def _forget(self, limit: asyncio.Timeout) -> None:
        self._bytes -= self._reading.pop(limit, 0)
