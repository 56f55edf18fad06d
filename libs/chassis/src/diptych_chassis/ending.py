"""How a process ends: asked once it drains, asked twice it goes at once."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

from diptych_telemetry import logger

CUT_OFF_S = 5.0
"""Beyond `drain_s`: a service that drains itself ends by itself."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logger(__name__)


class Ending:
    """Turns signals into `stopping`, and limits what follows.

    Args:
        drain_s: How long a serving process may take; one that does not serve yet holds nothing
            and ends at once.
    """

    def __init__(self, drain_s: float) -> None:
        self.stopping = asyncio.Event()
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
            loop.add_signal_handler(number, self.ask)
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

    def ask(self) -> None:
        """Begin to end."""
        at_once = self.stopping.is_set() or not self.serving
        wait_s = 0.0 if at_once else self._drain_s + CUT_OFF_S
        with contextlib.suppress(RuntimeError):  # expired already: ending as fast as it can
            self._limit.reschedule(asyncio.get_running_loop().time() + wait_s)
        self.stopping.set()
        log.info("service_stopping", at_once=at_once)
