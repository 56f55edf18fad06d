"""Our own events of a response on a WebSocket, for those who ask (`"diptych": {"events": true}`).

`diptych:queue`: how many are served before it, and when its first token is due; until there is one.
`diptych:migration`: a worker was lost or gave up, and another goes on. `diptych:energy`: what it
took, just before its last event. They depend on time and not on tokens, so they do not count: each
repeats the number of the newest event, and whoever goes on after that number misses nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from diptych_contracts.journal import Report
from diptych_gateway.answering.answers import Joules
from diptych_gateway.answering.streams import AnswerStream
from diptych_policy.queue_view import Place, QueueView

_LOOK_S = 0.5
"""Schedulers report twice as often."""


class _OwnEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    sequence_number: int
    response_id: str
    stream_id: str | None = None


class _Queue(_OwnEvent, kw_only=True):
    position: int
    eta_s: float | None


class _Migration(_OwnEvent, kw_only=True):
    attempt: int


class _Energy(_OwnEvent, kw_only=True):
    joules: Joules
    energy_source: str


class OwnEvents:
    """Of one answer.

    Args:
        response_id: Whose they are.
        stream: The answer.
        queues: What schedulers say of theirs.
        now_s: The monotonic clock.
        stream_id: The lane.
    """

    def __init__(
        self,
        response_id: str,
        stream: AnswerStream,
        queues: QueueView,
        now_s: Callable[[], float],
        *,
        stream_id: str | None,
    ) -> None:
        self._stream = stream
        self._queues = queues
        self._now_s = now_s
        self._same = {"response_id": response_id, "stream_id": stream_id}
        self._place: Place | None = None
        self._told: Place | None = None
        self._attempt = stream.attempt

    def news(self, number: int) -> list[bytes]:
        """What has happened since the last call; `number` is the newest event's."""
        events: list[bytes] = []
        if self._stream.attempt != self._attempt:
            self._attempt = self._stream.attempt
            events.append(self._made(_Migration, "migration", number, attempt=self._attempt))
        place = self._look()
        if place is not None and place != self._told:
            self._told = place
            told = {"position": place.position, "eta_s": place.eta_s}
            events.append(self._made(_Queue, "queue", number, **told))
        return events

    def ended(self, number: int) -> list[bytes]:
        """What it took; there must be an end."""
        end = self._stream.end
        assert end is not None
        report = end.report or Report(attempt=end.attempt)
        joules = Joules(report.prefill_j, report.decode_j, report.prefill_j + report.decode_j)
        source = report.energy_source
        return [self._made(_Energy, "energy", number, joules=joules, energy_source=source)]

    @staticmethod
    @asynccontextmanager
    async def watched(own: "OwnEvents | None") -> AsyncIterator[None]:
        """Wake the answer's writer inside the `async with` whenever `own` has news."""
        if own is None:
            yield
            return
        task = asyncio.create_task(own._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._stream.attempt != self._attempt or self._look() != self._told:
                self._stream.wake.set()

    def _look(self) -> Place | None:
        """Its place; once it has a token, what was told last."""
        if self._stream.tokens or self._stream.end is not None:
            return self._told
        priority_class = self._stream.request.priority_class
        self._place = self._queues.place(priority_class, self._place, now_s=self._now_s())
        return self._place

    def _made(self, kind: type[_OwnEvent], name: str, number: int, **says: object) -> bytes:
        event = kind(type=f"diptych:{name}", sequence_number=number, **self._same, **says)  # type: ignore[arg-type]
        return msgspec.json.encode(event)
