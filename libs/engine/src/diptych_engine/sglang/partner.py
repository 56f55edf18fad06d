"""A prefill server that a decode server's adapter asks itself, for answers in one piece."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from diptych_contracts.errors import DiptychError
from diptych_engine.over_http.client import EngineHttp
from diptych_engine.sglang.answers import read_answer
from diptych_engine.sglang.asking import GENERATE
from diptych_engine.sglang.rooms import Rooms

log = logging.getLogger("diptych.engine")

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
    async def leg(
        self,
        body: bytes,
        name: str,
        *,
        silence_s: float,
        failed: Callable[[], Awaitable[None]],
    ) -> AsyncIterator[None]:
        """Has it compute `body`'s prompt; leaving the context before that is done aborts it.

        Args:
            body: What is asked of both servers.
            name: Its `rid`.
            silence_s: Longest time without a byte.
            failed: Awaited if it does not: nobody else tells decode, which waits in the room.
        """
        draining = asyncio.create_task(self._drain(body, silence_s, failed))
        try:
            yield
        finally:
            if not draining.done():
                with suppress(DiptychError):
                    abort = msgspec.json.encode({"rid": name})
                    await self._http.post("/abort_request", abort, within_s=ABORT_S)
                draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    async def _drain(
        self, body: bytes, silence_s: float, failed: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            async with self._http.events(GENERATE, body, silence_s=silence_s) as events:
                async for data in events:
                    read_answer(data)
        except DiptychError as err:
            log.warning("prefill_leg_failed", extra={"error": str(err)})
            await failed()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()
