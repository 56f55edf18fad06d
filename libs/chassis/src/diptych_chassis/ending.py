"""How a process ends: asked once it drains, asked twice it goes at once.

SIGTERM leaves the drain its time. SIGINT is a person at a keyboard, who waits.
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

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Run the process's life inside: its signals are handled, its end has a limit."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.ask, number)
        try:
            async with self._limit:
                yield
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
        self.stopping.set()
        log.info("service_stopping", at_once=at_once)
