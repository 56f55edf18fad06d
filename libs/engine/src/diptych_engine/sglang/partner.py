"""A prefill server that a decode server's adapter asks itself, for answers in one piece."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from diptych_contracts.errors import DiptychError
from diptych_engine.over_http.client import EngineHttp
from diptych_engine.sglang.rooms import Rooms

ABORT_S = 5.0


class Partner:
    """One prefill server.

    Args:
        url: Where it listens.
        api_key: Its key.
        rooms: Where the legs meet.
    """

    def __init__(self, url: str, *, api_key: str, rooms: Rooms) -> None:
        self.rooms = rooms
        self._http = EngineHttp(url, api_key=api_key, setting="prefill_url")

    @asynccontextmanager
    async def leg(self, path: str, body: bytes, name: str, silence_s: float) -> AsyncIterator[None]:
        """Has it compute `body`'s prompt; leaving the context before that is done aborts it."""
        draining = asyncio.create_task(self._drain(path, body, silence_s))
        try:
            yield
        finally:
            if not draining.done():
                with suppress(DiptychError):
                    abort = msgspec.json.encode({"rid": name})
                    await self._http.post("/abort_request", abort, within_s=ABORT_S)
                draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    async def _drain(self, path: str, body: bytes, silence_s: float) -> None:
        async with self._http.events(path, body, silence_s=silence_s) as events:
            async for _ in events:
                pass

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()
