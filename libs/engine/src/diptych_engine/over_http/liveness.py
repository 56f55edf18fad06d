"""Whether an engine behind HTTP still works, and not only its web server."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_engine.over_http.refusals import KeyRefused

log = logging.getLogger("diptych.engine")

T = TypeVar("T")
RETRY_S = 0.5


async def until_ready(ask: Callable[[], Awaitable[T]], *, within_s: float) -> T:
    """What `ask` gives once it does: a server that starts is away, or says 503.

    What it waits for is logged once, and again when it changes.

    Raises:
        EngineGone: it was not ready within `within_s`.
        Permanent: as `ask` does, and where the server wants another key.
    """
    give_up_s, told = time.monotonic() + within_s, ""
    while True:
        try:
            return await ask()
        except KeyRefused as err:
            raise Permanent(f"{err}; expected it to take the option 'api_key'") from err
        except (EngineGone, Refused) as err:
            if str(err) != told:
                told = str(err)
                log.info("engine_not_ready", extra={"error": told})
            if time.monotonic() + RETRY_S > give_up_s:
                raise EngineGone(f"not ready within {within_s} s: {err}") from err
        await asyncio.sleep(RETRY_S)


class Liveness:
    """Judges by what comes of requests, and asks for a proof where none run.

    A proof waits its turn in the engine, so asking a busy one would take load for death.

    Args:
        silence_s: Longest time in which nothing may come while requests run.
        probe_s: How old a proof may be while none run.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        silence_s: float,
        probe_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._silence_s = silence_s
        self._probe_s = probe_s
        self._clock = clock
        self._running = 0
        self._heard_s = clock()
        self._proved_s = -probe_s + clock()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A request runs."""
        if self._running == 0:
            self._heard_s = self._clock()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def heard(self) -> None:
        """Something has come from the engine itself."""
        self._heard_s = self._proved_s = self._clock()

    async def check(
        self, *, alive: Callable[[], Awaitable[None]], proof: Callable[[], Awaitable[object]]
    ) -> None:
        """Ask.

        Args:
            alive: Asks the server; always done.
            proof: Has the engine itself compute something.

        Raises:
            EngineGone: it does not answer, or gives no sign of getting on.
        """
        try:
            await alive()
            if self._running:
                silent_s = self._clock() - self._heard_s
                if silent_s > self._silence_s:
                    raise EngineGone(
                        f"{self._running} requests run, and nothing came for {silent_s:.0f} s"
                    )
            elif self._clock() - self._proved_s >= self._probe_s:
                await proof()
                self._proved_s = self._clock()
        except EngineGone:
            raise
        except DiptychError as err:
            raise EngineGone(f"no token for a probe: {err}") from err
