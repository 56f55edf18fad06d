"""How a process ends: asked once it drains, asked twice it goes at once.

SIGTERM leaves the drain its time. SIGINT is a person at a keyboard, who waits. What goes on after
its limit is cancelled; what swallows that (see `cancelling`), again and again.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

from diptych_telemetry import logger

CUT_OFF_S = 5.0
"""Beyond `drain_s`: a service that drains itself ends by itself."""
QUICK_S = 4.0
"""The longest drain after SIGINT."""
INSIST_S = 5.0
"""Beyond the limit: longer than it takes to leave a bus that does not answer."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logger(__name__)


class Stopping(asyncio.Event):
    """Set once: the process is to end."""

    def __init__(self) -> None:
        super().__init__()
        self.quick = False
        """Whether somebody waits for it."""

    def drain_s(self, usual_s: float) -> float:
        """How long a drain that may usually take `usual_s` may take now."""
        return min(usual_s, QUICK_S) if self.quick else usual_s


class Ending:
    """Turns signals into `stopping`, and limits what follows.

    Args:
        drain_s: How long a serving process may take; one that does not serve yet holds nothing
            and ends at once.
    """

    def __init__(self, drain_s: float) -> None:
        self.stopping = Stopping()
        self.serving = False
        self.cut_off = False
        """Whether the limit ended a process that served."""
        self._drain_s = drain_s
        self._limit = asyncio.timeout(None)
        self._insisting: asyncio.TimerHandle | None = None
        self._life: asyncio.Task[object] | None = None
        self._insisted = 0
        """How often `_life` was cancelled beyond its limit."""

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Run the process's life inside: its signals are handled, its end has a limit."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.ask, number)
        try:
            async with self._limit:
                self._life = asyncio.current_task()
                try:
                    yield
                finally:
                    self._come_to_an_end()
        except TimeoutError:
            if not self._limit.expired():
                raise
            if self.serving:
                self.cut_off = True
                log.error("stop_cut_off", drain_s=self._drain_s)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def ask(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Begin to end."""
        self.stopping.quick |= number is signal.SIGINT
        at_once = self.stopping.is_set() or not self.serving
        wait_s = 0.0 if at_once else self.stopping.drain_s(self._drain_s) + CUT_OFF_S
        with contextlib.suppress(RuntimeError):  # expired already: ending as fast as it can
            self._limit.reschedule(asyncio.get_running_loop().time() + wait_s)
        self._insist_in(wait_s + INSIST_S)
        self.stopping.set()
        log.info("service_stopping", at_once=at_once)

    def _insist_in(self, seconds: float) -> None:
        if self._insisting is not None:
            self._insisting.cancel()
        self._insisting = asyncio.get_running_loop().call_later(seconds, self._insist)

    def _insist(self) -> None:
        """Cancel everything, until the loop is closed: a cancellation may have been swallowed."""
        left = asyncio.all_tasks()
        log.warning("stop_insisted", tasks=sorted(task.get_name() for task in left)[:10])
        for task in left:
            self._insisted += task is self._life
            task.cancel()
        self._insist_in(INSIST_S)

    def _come_to_an_end(self) -> None:
        """What is left of the process's life is not cancelled by this any more."""
        while self._life is not None and self._insisted:
            self._life.uncancel()
            self._insisted -= 1
        self._life = None
