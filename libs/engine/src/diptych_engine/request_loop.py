"""Drives a `RequestEngine`: one thread, one event loop, a task per sequence.

The engine schedules; here is what all adapters have in common: who is here and who waits, the order
of news, stop strings and limits, aborts, and whether the engine still lives. A sequence that fails
leaves alone; anything else that goes wrong is a bug and ends the process.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from diptych_contracts.errors import DiptychError, Refused
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.sampling import Stopping
from diptych_engine.embedding import Vectors
from diptych_engine.failing import end_process, failed
from diptych_engine.port import (
    EngineLoad,
    EngineSpec,
    SequenceKey,
    SequenceWork,
    StepNews,
    StepReport,
    never,
)
from diptych_engine.request_conversation import check_phase
from diptych_engine.request_port import EngineStats, RequestEngine
from diptych_engine.request_room import Audience, RequestRoom
from diptych_engine.request_seats import Seat, Seats
from diptych_engine.request_watch import WatchTimes
from diptych_engine.sequence import LiveSequence, StopText

STOP_S = 10.0
"""How long `stop` waits for an engine to let go: one that hangs is left to itself."""


class RequestLoop:
    """An `Engine` made of a `RequestEngine`.

    Args:
        engine: Owned from here on: used on the loop's thread only, closed by `stop`.
        answer_text: Makes what finds stop strings in an answer.
        on_crash: Called on the loop's thread when it dies of a bug; must not return to business
            as usual. The default ends the process.
        clock: Seconds, for how long answers take.
        times: How often the engine is asked how it is.
    """

    def __init__(
        self,
        engine: RequestEngine,
        answer_text: Callable[[Stopping], StopText],
        *,
        on_crash: Callable[[BaseException], None] = end_process,
        clock: Callable[[], float] = time.perf_counter,
        times: WatchTimes | None = None,
    ) -> None:
        self._engine = engine
        self._answer_text = answer_text
        self._on_crash = on_crash
        self._clock = clock
        self._times = times or WatchTimes()
        self._seats = Seats()
        self._opened: Future[None] = Future()
        self._audience: Future[Audience | None] = Future()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # guards the rest
        self._room: RequestRoom | None = None
        self._early: list[Callable[[RequestRoom], None]] = []
        self._forgetting: set[Future[int]] = set()
        self._over = False

    @property
    def spec(self) -> EngineSpec:
        """What the engine is; final once it is open."""
        return self._engine.spec

    @property
    def gone(self) -> str | None:
        """Why the engine is dead or out of reach; see `port.Engine`."""
        return self._room.watch.gone if self._room is not None else None

    def open(self) -> None:
        """Start the engine; returns once it is ready. `start` does so where nobody has.

        Raises:
            Permanent: it never will be.
            EngineGone: it cannot be reached.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        self._opened.result()

    def start(
        self, listener: Callable[[StepReport], None], *, paused: Callable[[], bool] = never
    ) -> None:
        """Begin; see `port.Engine`. Raises as `open` does."""
        self.open()
        self._audience.set_result(Audience(listener, paused))

    def stop(self) -> None:
        """Let go of all sequences, stop the thread and close the engine."""
        self._seats.close()
        with self._lock:
            self._over = True
            forgetting, room = list(self._forgetting), self._room
        for done in forgetting:
            done.cancel()
        if room is not None:
            self._ask(room.close)
        elif not self._audience.done():
            self._audience.set_result(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def submit(self, work: SequenceWork) -> None:
        """Queue `work`; see `port.Engine`.

        Raises:
            ValueError: if the same attempt is already here.
            RuntimeError: after `stop`.
        """
        try:
            sequence = LiveSequence.begin(work, self.spec, self._answer_text)
            check_phase(work, self.spec)
            settled: StepNews | None = sequence.finished()
        except DiptychError as err:
            settled = failed(work.key, err)
        if settled is not None:
            self._seats.check_room(work.key)
            outcome = settled
            self._post(lambda room: room.settle(work, outcome))
        else:
            seat = Seat(sequence, work)
            self._seats.add(seat)
            self._post(lambda room: room.take_in(seat))

    def abort(self, key: SequenceKey) -> None:
        """Stop and free `key`; see `port.Engine`. Answered once the adapter has let go of it."""
        self._post(lambda room: room.abort(key))

    def forget(self, tenant: str) -> "Future[int]":
        """Let `tenant` find no cached prefix again; gives how many blocks were known of it.

        Its name to the engine changes: what lies under the old one gives way by and by.
        """
        done: Future[int] = Future()
        with self._lock:
            if self._over:
                done.cancel()
                return done
            self._forgetting.add(done)
        done.add_done_callback(self._forgetting.discard)
        self._post(lambda room: room.forget(tenant, done))
        return done

    def embed(self, texts: Sequence[Sequence[int]]) -> "Future[Vectors]":
        """Refuse: it gives no vectors."""
        raise Refused(RefusalReason.UNSUPPORTED, f"{self.spec.engine} gives no vectors")

    def load(self) -> EngineLoad:
        """How full it is now. Cells are promised from `submit` on."""
        stats = self._room.watch.stats if self._room is not None else EngineStats()
        return self._seats.load(stats)

    @property
    def pins(self) -> None:
        """None: what it caches, and for how long, only the engine knows."""
        return None

    def _post(self, call: Callable[[RequestRoom], None]) -> None:
        """Have `call` made on the loop, in the order of posts; after `stop` no more."""
        with self._lock:
            room = self._room
            if room is None:
                self._early.append(call)
                return
        self._ask(lambda: call(room))

    def _ask(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # it is closed
            return

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as err:  # a silent dead thread would be worse than any bug
            if self._opened.done():
                self._on_crash(err)
            else:
                self._opened.set_exception(err)

    async def _live(self) -> None:
        """Open the engine, serve until `stop`, close it."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._engine.start()
            self._opened.set_result(None)
            audience = await asyncio.wrap_future(self._audience)
            if audience is not None:
                await self._serve(audience)
        finally:
            await self._engine.close()

    async def _serve(self, audience: Audience) -> None:
        room = RequestRoom(
            self._engine, self._seats, audience, clock=self._clock, times=self._times
        )
        with self._lock:
            self._room = room
            early, self._early = self._early, []
        await room.serve(early)
