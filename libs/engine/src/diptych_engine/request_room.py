"""What of a `RequestLoop` lives on its event loop: who waits, who is asked, who leaves."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from diptych_contracts.errors import DiptychError, EngineGone
from diptych_engine.failing import failed
from diptych_engine.port import (
    NewTokens,
    SequenceAborted,
    SequenceKey,
    SequenceWork,
    StepNews,
    StepReport,
)
from diptych_engine.request_conversation import Conversation
from diptych_engine.request_port import KvCleared, KvEvent, RequestEngine
from diptych_engine.request_seats import Seat, Seats
from diptych_engine.request_watch import Watch, WatchTimes
from diptych_engine.reused_blocks import ReusedBlocks
from diptych_engine.step_loop import PAUSE_S
from diptych_engine.turn_reports import TurnReports


@dataclass(frozen=True, slots=True)
class Audience:
    """Who hears what happens."""

    listener: Callable[[StepReport], None]
    paused: Callable[[], bool]
    """Whether nothing can be told now: then nothing is heard either."""


class RequestRoom:
    """One engine's sequences, each a task. Made and used on one event loop.

    Args:
        engine: Open.
        seats: Where the sequences are known to other threads.
        audience: Told.
        clock: Seconds.
        times: How often the engine is asked how it is.
    """

    def __init__(
        self,
        engine: RequestEngine,
        seats: Seats,
        audience: Audience,
        *,
        clock: Callable[[], float],
        times: WatchTimes,
    ) -> None:
        self._seats = seats
        self._paused = audience.paused
        self._most = engine.spec.max_sequences
        self._queue: deque[Seat] = deque()
        self._running = 0
        self._closed = asyncio.Event()
        self._group = asyncio.TaskGroup()
        loop = asyncio.get_running_loop()
        self._reports = TurnReports(loop, audience.listener, clock)
        self._conversation = Conversation(engine, self._reports, self._unpaused)
        self._blocks = ReusedBlocks(engine.spec)
        self.watch = Watch(engine, times, on_gone=self._on_gone, on_kv=self._on_kv)

    async def serve(self, early: Sequence[Callable[["RequestRoom"], None]]) -> None:
        """Do what was asked `early`, and hold what is taken in, until `close`."""
        async with self._group as group:
            watching = [group.create_task(watch) for watch in self.watch.all()]
            for call in early:
                call(self)
            await self._closed.wait()
            for task in (*watching, *(seat.task for seat in self._seats.all())):
                if task is not None:
                    task.cancel()

    def close(self) -> None:
        """Let go of everything; nothing more is told."""
        self._closed.set()

    def settle(self, work: SequenceWork, outcome: StepNews) -> None:
        """Tell of work that needs no engine."""
        if work.on_imported is not None and isinstance(outcome, NewTokens):
            work.on_imported()
        self._reports.tell(outcome)

    def take_in(self, seat: Seat) -> None:
        """Queue `seat`."""
        self._queue.append(seat)
        if self.watch.gone is not None:
            self._give_up(seat, EngineGone(self.watch.gone))
        self._seat_waiting()

    def abort(self, key: SequenceKey) -> None:
        """Let go of `key`, and say so once that is done."""
        seat = self._seats.get(key)
        if seat is None:
            self._reports.tell(SequenceAborted(key))
            return
        seat.let_go()
        seat.aborting = True
        if seat.task is None:
            self._queue.remove(seat)
            self._seats.remove(seat)
            self._reports.tell(SequenceAborted(key))

    def forget(self, tenant: str, done: "Future[int]") -> None:
        """Let `tenant` find no cached prefix again."""
        _, removed = self._blocks.forget(tenant)
        self._reports.blocks(removed=removed)
        if done.set_running_or_notify_cancel():
            done.set_result(len(removed))

    def _seat_waiting(self) -> None:
        while self._queue and self._running < self._most and not self._closed.is_set():
            seat = self._queue.popleft()
            seat.work = self._blocks.sent(seat.work)
            seat.task = self._group.create_task(self._hold(seat))
            seat.task.add_done_callback(partial(self._left, seat))
            self._running += 1
            self._reports.busy(busy=True)

    async def _hold(self, seat: Seat) -> None:
        try:
            await self._conversation.hold(seat)
        except DiptychError as err:
            if isinstance(err, EngineGone):
                self.watch.suspect()
            self._fail(seat, err)

    def _fail(self, seat: Seat, err: DiptychError) -> None:
        if not seat.told and not seat.aborting:
            seat.told = True
            self._reports.tell(failed(seat.work.key, err))

    def _left(self, seat: Seat, _task: asyncio.Task[None]) -> None:
        """The adapter has returned."""
        self._seats.remove(seat)
        self._running -= 1
        self._reports.busy(busy=self._running > 0)
        if self._closed.is_set():
            return
        if seat.aborting:
            self._reports.tell(SequenceAborted(seat.work.key))
        self._fail(seat, EngineGone("the engine cancelled it by itself"))
        self._seat_waiting()

    def _on_gone(self, err: EngineGone) -> None:
        self._on_kv(KvCleared())
        for seat in self._seats.all():
            self._give_up(seat, err)

    def _give_up(self, seat: Seat, err: EngineGone) -> None:
        """Nothing of `seat` is left: its engine is gone."""
        seat.let_go()
        self._fail(seat, err)
        if seat.task is None and seat in self._queue:
            self._queue.remove(seat)
            self._seats.remove(seat)

    def _on_kv(self, event: KvEvent) -> None:
        stored, removed = self._blocks.told(event)
        self._reports.blocks(stored=stored, removed=removed)

    async def _unpaused(self) -> None:
        while self._paused():  # noqa: ASYNC110 - it is another thread's, and rare
            await asyncio.sleep(PAUSE_S)
