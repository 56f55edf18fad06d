"""Prompts that jobs only name: fetched once, checked, and kept for a while.

A decode worker fetches when it gives a ticket, so the prompt is here when the job comes; a worker
that tries again has it still.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from diptych_bus.port import Bus
from diptych_contracts.errors import DiptychError, Expired, Permanent, Transient
from diptych_contracts.jobs import Generation
from diptych_contracts.prompts import PromptRef, unpacked
from diptych_contracts.streams import PROMPTS
from diptych_telemetry import logger

CACHE_BYTES = 64 * 1024 * 1024
"""What is kept: five prompts of six million tokens in two bytes each."""
FETCH_S = 10.0
"""How long a prompt may take to come while the bus is there."""
_PAUSE_S = 0.1

log = logger("worker")


class Prompts:
    """The prompts of this worker's jobs. Used on the event loop only."""

    def __init__(
        self, bus: Bus, *, now_s: Callable[[], float], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._bus = bus
        self._now_s = now_s
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[str, tuple[PromptRef, Sequence[int]]] = OrderedDict()
        self._coming: dict[str, asyncio.Task[Sequence[int]]] = {}

    @property
    def kept_bytes(self) -> int:
        """What the kept prompts take."""
        return sum(ref.n_bytes for ref, _ in self._kept.values())

    def expect(self, generation: Generation) -> None:
        """A job of `generation` will come: have its prompt by then."""
        if generation.prompt is not None and generation.prompt.digest not in self._kept:
            self._fetching(generation.prompt)

    async def ids(self, generation: Generation) -> Sequence[int]:
        """The prompt of `generation`.

        Raises:
            Permanent: it is gone; no other worker would find it.
            Unverified: it is not what was stored.
            Expired: the bus does not give it.
        """
        ref = generation.prompt
        if ref is None:
            return generation.prompt_ids
        kept = self._kept.get(ref.digest)
        if kept is not None:
            self._kept.move_to_end(ref.digest)
            return kept[1]
        # Others may wait for it too: who is cancelled here does not take it from them.
        return await asyncio.shield(self._fetching(ref))

    def forget(self) -> None:
        """Keep none: a kept prompt does not say whose it is, and whoever needs it fetches again."""
        self._kept.clear()

    async def close(self) -> None:
        """Fetch no more."""
        going = list(self._coming.values())
        for task in going:
            task.cancel()
        if going:
            await asyncio.wait(going)

    def _fetching(self, ref: PromptRef) -> "asyncio.Task[Sequence[int]]":
        task = self._coming.get(ref.digest)
        if task is None:
            task = self._coming[ref.digest] = asyncio.create_task(self._fetch(ref))
            task.add_done_callback(lambda done: self._came(ref, done))
        return task

    def _came(self, ref: PromptRef, task: "asyncio.Task[Sequence[int]]") -> None:
        del self._coming[ref.digest]
        if task.cancelled():
            return
        err = task.exception()  # seen, even if nobody waits
        if err is None:
            self._keep(ref, task.result())
        elif isinstance(err, DiptychError):
            log.warning("prompt_not_fetched", request_id=ref.name, error=str(err))

    def _keep(self, ref: PromptRef, ids: Sequence[int]) -> None:
        self._kept[ref.digest] = (ref, ids)
        while self.kept_bytes > self._cache_bytes:
            self._kept.popitem(last=False)

    async def _fetch(self, ref: PromptRef) -> Sequence[int]:
        give_up_s = self._now_s() + FETCH_S
        while True:
            try:
                async with asyncio.timeout(FETCH_S):
                    data = await self._bus.get_object(PROMPTS, ref.name)
                break
            except (Transient, TimeoutError) as err:
                if not self._bus.connected:
                    give_up_s = self._now_s() + FETCH_S
                elif self._now_s() >= give_up_s:
                    raise Expired(f"prompt {ref.name} did not come in {FETCH_S:g} s") from err
                await asyncio.sleep(_PAUSE_S)
        if data is None:
            raise Permanent(f"the prompt of the request is gone: there is no object {ref.name}")
        return await asyncio.to_thread(unpacked, data, ref)
