"""Writes that follow an answer: they wait in order while the bus is away.

Beyond `MAX_WAITING` the oldest is dropped: what stands in it must be found out otherwise.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from diptych_contracts.errors import Transient

MAX_WAITING = 4096
_STEP_TIMEOUT_S = 3.0
_PAUSE_S = 0.25

Key = TypeVar("Key")
What = TypeVar("What")


class WriteBehind(Generic[Key, What]):
    """One write after another, at most one for each key.

    Args:
        write: Writes it; raises `Transient` where that is to be tried again.
        drop: Told of one that will not be written.
    """

    def __init__(
        self, write: Callable[[Key, What], Awaitable[None]], drop: Callable[[Key, What], None]
    ) -> None:
        self._write = write
        self._drop = drop
        self._waiting: dict[Key, What] = {}
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def get(self, key: Key) -> What | None:
        """What waits under `key`."""
        return self._waiting.get(key)

    def put(self, key: Key, what: What) -> None:
        """Write `what` later, instead of what waits under `key`."""
        while len(self._waiting) >= MAX_WAITING:
            oldest = next(iter(self._waiting))
            self._drop(oldest, self._waiting.pop(oldest))
        self._waiting[key] = what
        self._idle.clear()
        self._news.set()

    async def settled(self, timeout_s: float) -> bool:
        """Wait until everything is written; False if `timeout_s` ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._next()
            self._idle.set()

    async def _next(self) -> None:
        key, what = next(iter(self._waiting.items()))
        try:
            async with asyncio.timeout(_STEP_TIMEOUT_S):
                await self._write(key, what)
        except (Transient, TimeoutError):
            await asyncio.sleep(_PAUSE_S)
            return
        if self._waiting.get(key) is what:
            del self._waiting[key]
