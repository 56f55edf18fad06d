"""A gateway without a front door: stores requests, beats, and folds its own journal.

It asserts what a client relies on: one end per request, and tokens without gap or repeat.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec

from diptych_bus.port import Bus, JournalItem, Subscription
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End
from diptych_contracts.requests import Request
from diptych_gateway.keeping.records import Records
from diptych_policy.journal import RequestView, parts
from diptych_policy.voices import secret_of

_KEY = b"of requests that were given no secret"
_BEAT_S = 0.1
_PAUSE_S = 0.05


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


class BusClient:
    """Sends requests as gateway `me`."""

    def __init__(self, bus: Bus, me: Incarnation, *, unix_ms: Callable[[], int] = _unix_ms) -> None:
        self._bus = bus
        self._unix_ms = unix_ms
        self._me = me
        self._following: Subscription | None = None
        self._beating: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._records = Records(bus, me)
        self._marking: asyncio.Task[None] | None = None
        self.views: dict[str, RequestView] = {}
        self.delivered: dict[str, list[int]] = {}
        self.most_at_once = 0
        """Most tokens that one entry brought."""
        self.ends: dict[str, End] = {}

    async def start(self) -> None:
        """Follow the journal and beat."""
        self._following = await self._bus.follow(self._me, self._hear)
        self._beating = asyncio.create_task(self._beat())
        self._marking = asyncio.create_task(self._records.run())

    async def close(self) -> None:
        """Fall silent."""
        if self._following is not None:
            going = [task for task in (self._beating, self._marking) if task is not None]
            for task in going:
                task.cancel()
            await asyncio.wait(going)
            await self._following.close()

    async def send(self, request: Request, *, voices: bool = True) -> None:
        """Store a request, as a gateway does; without `voices`, as an old one did."""
        request = msgspec.structs.replace(
            request,
            gateway=self._me,
            created_unix_ms=self._unix_ms(),
            secret=secret_of(_KEY, request.request_id) if voices else b"",
        )
        self.expect(request.request_id, request.secret)
        subject = subjects.request(request.priority_class, request.model)
        while True:
            try:
                await self._bus.store(
                    subject,
                    request,
                    msg_id=request.request_id,
                    timeout_s=2.0,
                    headers=request.headers,
                )
            except BusAway:  # it may be stored: ask again with the same id
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    def cancel(self, request: Request) -> None:
        """Have it cancelled, as a gateway does whose client has left."""
        mine = msgspec.structs.replace(request, gateway=self._me)
        self._records.cancel(mine, "the client left")

    def expect(self, request_id: RequestId, secret: bytes = b"") -> None:
        """Hear of a request that somebody else sends."""
        self.views[request_id] = RequestView(request_id, secret=secret)
        self.delivered[request_id] = []

    async def ended(self, request_id: str, timeout_s: float = 240.0) -> End:
        """Wait for the end of a request."""
        await self.until(lambda: request_id in self.ends, timeout_s=timeout_s)
        return self.ends[request_id]

    async def until(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for journal news until `holds()`."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def has_tokens(self, request_id: str, n_tokens: int) -> None:
        """Wait until `n_tokens` of an answer were delivered."""
        await self.until(lambda: len(self.delivered[request_id]) >= n_tokens)

    def _hear(self, item: JournalItem) -> None:
        for part in parts(item.entry):
            view = self.views.get(RequestId(part.request_id))
            if view is None:
                continue
            change = view.apply(part)
            self.delivered[part.request_id] += change.new_ids
            self.most_at_once = max(self.most_at_once, len(change.new_ids))
            if change.end is not None:
                assert part.request_id not in self.ends, "a request ended twice"
                self.ends[part.request_id] = change.end
        self._news.set()

    async def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            beat = Beat(member=self._me, service="gateway", count=count, ready=True)
            await self._bus.publish(subjects.beat(self._me), beat)
            await asyncio.sleep(_BEAT_S)
