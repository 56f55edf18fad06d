"""Signs of life from a thread of its own, so that a busy main loop does not look dead.

The thread has its own event loop and its own NATS connection: core publish only, nothing to heal.
While the server is away beats are skipped, not buffered: a late beat would tell a lie.
"""

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

from nats.errors import Error as NatsError

from diptych_bus.access import Access
from diptych_bus.jetstream.client import IdentifiedClient
from diptych_chassis import cancelling
from diptych_chassis.repeating import every
from diptych_chassis.vitals import Vitals
from diptych_contracts import subjects
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import encode
from diptych_telemetry import logger, metrics

PERIOD_S = 0.1
_CONNECT_PAUSE_S = 0.2
_CALL_TIMEOUT_S = 5.0
_LAST_S = 1
"""How long the last beat may take to leave."""

T = TypeVar("T")
log = logger(__name__)


class BeatThread:
    """Publishes a `Beat` of this process every 100 ms until it is stopped.

    Args:
        member: Whose beats they are.
        service: Its service's name.
        url: Of the NATS server.
        vitals: Where readiness is read and each beat is noted.
        access: By which it is believed to be that member; None on a server without identities.
    """

    def __init__(
        self,
        member: Incarnation,
        service: str,
        *,
        url: str,
        vitals: Vitals,
        access: Access | None = None,
    ) -> None:
        self._access = access
        self._member = member
        self._service = service
        self._url = url
        self._vitals = vitals
        self._count = 0
        self._thread = threading.Thread(target=self._main, name="beats", daemon=True)
        self._running = threading.Event()
        self._leaving = False
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def start(self) -> None:
        """Begin. Does not wait for the server."""
        self._thread.start()
        self._running.wait(_CALL_TIMEOUT_S)

    def stop(self, *, leaving: bool = False) -> None:
        """End, and wait for the thread.

        Args:
            leaving: Say in a last beat that the process goes as it should: else its silence would
                be taken for a death.
        """
        self._leaving = leaving
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CALL_TIMEOUT_S)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in this thread's loop and wait for it (5 s at most)."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    def _main(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._running.set()
        beating = asyncio.create_task(self._beat_on())
        await self._stop.wait()
        await cancelling.end(beating)

    async def _beat_on(self) -> None:
        while True:
            try:
                await self._beat()
            except (OSError, NatsError):
                log.debug("beats_disconnected")
            except Exception:
                # Without beats the fleet takes this process for dead: whatever it was, go on.
                log.exception("beats_failed")
            await asyncio.sleep(_CONNECT_PAUSE_S)

    async def _beat(self) -> None:
        client = IdentifiedClient(self._access)
        await client.connect_as(self._url, **_options(f"{self._member}.beats"))
        try:
            await every(PERIOD_S, lambda: self._send(client))
        finally:
            if self._leaving:
                with suppress(OSError, NatsError, TimeoutError):
                    await self._send(client)
                    await client.flush(_LAST_S)
            await client.close()

    async def _send(self, client: IdentifiedClient) -> None:
        if client.gave_up:
            raise ConnectionError("another connection is needed")
        if not client.is_connected:
            return
        self._count += 1
        readiness = self._vitals.readiness
        beat = Beat(
            member=self._member,
            service=self._service,
            count=self._count,
            pid=os.getpid(),
            ready=readiness.ready,
            detail=readiness.detail,
            patience_ms=round(self._vitals.patience_s * 1000),
            leaving=self._leaving,
        )
        self._vitals.beat_sent(self._count, time.monotonic())
        await client.publish(subjects.beat(self._member), encode(beat))
        metrics.process().beats.inc()


def _options(name: str) -> dict[str, Any]:
    # 1 s pings notice a frozen server after 3 s; the default would take minutes. The jitter keeps a
    # fleet from returning all at once.
    return {
        "name": name,
        "connect_timeout": 1,
        "reconnect_time_wait": 0.1 * (1 + Random().random()),
        "max_reconnect_attempts": -1,
        "ping_interval": 1,
        "max_outstanding_pings": 2,
        "error_cb": _quiet,
    }


async def _quiet(_: Exception) -> None:
    """The service's own connection tells of trouble; twice would be noise."""
