"""Who is at an engine that schedules by itself.

    queued ── a seat is free ──▶ running ── finish or failure told ──▶ leaving ──▶ gone
      │                             │                                     ▲
      └──────── abort ──────────────┴──── cancelled, once ────────────────┘

A seat is free again only once the adapter has returned: until then the engine may hold something.
"""

import asyncio
import threading
from dataclasses import dataclass

from diptych_engine.port import EngineLoad, SequenceKey, SequenceWork
from diptych_engine.request_port import EngineStats
from diptych_engine.sequence import LiveSequence


@dataclass(slots=True)
class Seat:
    """A sequence from submission until the engine holds nothing of it."""

    sequence: LiveSequence
    work: SequenceWork
    """As the engine is asked."""
    task: asyncio.Task[None] | None = None
    """What holds it at the engine; None: it is queued."""
    aborting: bool = False
    told: bool = False
    """Whether its end has been told."""
    heard: bool = False
    """Whether tokens or an end have come."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV the engine had, as far as it has said."""

    def let_go(self) -> None:
        """Have the adapter stop, once: what it does then must not be cut short."""
        if self.task is not None and not self.told and not self.aborting:
            self.task.cancel()


class Seats:
    """All sequences of one engine, from `submit` on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seats: dict[SequenceKey, Seat] = {}
        self._closed = False

    def check_room(self, key: SequenceKey) -> None:
        """See that `key` may come.

        Raises:
            ValueError: if it is here.
            RuntimeError: after `close`.
        """
        with self._lock:
            self._check(key)

    def add(self, seat: Seat) -> None:
        """Take `seat` in. Raises as `check_room`."""
        with self._lock:
            self._check(seat.work.key)
            self._seats[seat.work.key] = seat

    def _check(self, key: SequenceKey) -> None:
        if self._closed:
            raise RuntimeError("the engine has stopped")
        if key in self._seats:
            raise ValueError(f"{key} is already here")

    def close(self) -> None:
        """Take nobody in from now on."""
        with self._lock:
            self._closed = True

    def remove(self, seat: Seat) -> None:
        """The engine holds nothing of `seat`."""
        with self._lock:
            del self._seats[seat.work.key]

    def get(self, key: SequenceKey) -> Seat | None:
        """The seat of `key`."""
        with self._lock:
            return self._seats.get(key)

    def all(self) -> list[Seat]:
        """Everybody, in the order they came."""
        with self._lock:
            return list(self._seats.values())

    def load(self, told: EngineStats) -> EngineLoad:
        """How full the engine is: who is here is counted here.

        How many of them it lets wait, and the cells in use where they are more, is what it said.
        """
        seats = self.all()
        held = sum(seat.task is not None for seat in seats)
        waits = min(held, told.waiting or 0)
        return EngineLoad(
            running=held - waits,
            waiting=len(seats) - held + waits,
            waiting_tokens=sum(len(s.sequence.tokens) for s in seats if not s.heard),
            kv_tokens_used=max(sum(s.sequence.cells for s in seats), told.kv_tokens_used or 0),
            pinned_orphans=told.pinned_orphans or 0,
            recomputed=told.recomputed or 0,
        )
