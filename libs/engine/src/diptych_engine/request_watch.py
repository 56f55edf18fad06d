"""Keeps asking an engine how it is: whether it lives, how full it is, which KV it keeps."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from diptych_contracts.errors import DiptychError, EngineGone
from diptych_engine.request_port import EngineStats, KvCleared, KvEvent, RequestEngine

AGAIN = 10
"""How much sooner than else an engine is probed again that did not answer."""


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """How often an engine is asked. It is gone after `misses` probes in a row without an answer."""

    health_s: float = 2.0
    answer_s: float = 5.0
    """How long an answer may take."""
    stats_s: float = 1.0
    misses: int = 2


class Watch:
    """What one engine says of itself. Used on its loop; `gone` and `stats` are read anywhere.

    Args:
        engine: Asked.
        times: When.
        on_gone: Told once when it is lost; it is asked on, and may come back.
        on_kv: Told of KV it keeps or drops.
    """

    def __init__(
        self,
        engine: RequestEngine,
        times: WatchTimes,
        *,
        on_gone: Callable[[EngineGone], None],
        on_kv: Callable[[KvEvent], None],
    ) -> None:
        self._engine = engine
        self._times = times
        self._on_gone = on_gone
        self._on_kv = on_kv
        self._suspected = asyncio.Event()
        self.gone: str | None = None
        self.stats = EngineStats()

    def all(self) -> tuple[Coroutine[None, None, None], ...]:
        """What is to run beside the requests, for as long as they do."""
        return self.health(), self.load(), self.kv()

    def suspect(self) -> None:
        """Ask for its health now: a request has found it gone."""
        self._suspected.set()

    async def health(self) -> None:
        """Probe it for ever."""
        misses = 0
        while True:
            doubted = misses > 0 and self.gone is None
            await self._pause(self._times.health_s / (AGAIN if doubted else 1))
            error = await self._probe()
            misses = 0 if error is None else misses + 1
            if error is None:
                self.gone = None
            elif misses >= self._times.misses and self.gone is None:
                self.gone = str(error)
                self._on_gone(error)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._suspected.wait()
        except TimeoutError:
            pass
        self._suspected.clear()

    async def _probe(self) -> EngineGone | None:
        try:
            async with asyncio.timeout(self._times.answer_s):
                await self._engine.health()
        except TimeoutError:
            return EngineGone(f"no answer to a probe within {self._times.answer_s} s")
        except EngineGone as err:
            return err
        except DiptychError as err:  # a server of another kind there, a proxy that is full
            return EngineGone(f"no answer to a probe: {err}")
        return None

    async def load(self) -> None:
        """Ask for ever how full it is."""
        while True:
            try:
                async with asyncio.timeout(self._times.answer_s):
                    self.stats = await self._engine.stats()
            except (DiptychError, TimeoutError):
                self.suspect()
            await asyncio.sleep(self._times.stats_s)

    async def kv(self) -> None:
        """Hear what it keeps, for as long as it tells."""
        while True:
            try:
                async for event in self._engine.kv_events():
                    self._on_kv(event)
                return
            except DiptychError:
                self._on_kv(KvCleared())
                self.suspect()
            await asyncio.sleep(self._times.health_s)
