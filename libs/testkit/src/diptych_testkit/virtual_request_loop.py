"""A request loop without a thread: it lives on the running loop, in virtual time too."""

import asyncio
from collections.abc import Callable

from diptych_contracts.sampling import Stopping
from diptych_engine.port import StepReport, never
from diptych_engine.request_loop import RequestLoop
from diptych_engine.request_port import RequestEngine
from diptych_engine.request_room import Audience
from diptych_engine.request_watch import WatchTimes
from diptych_engine.sequence import StopText


class VirtualRequestLoop(RequestLoop):
    """Everything `RequestLoop` does, as a task of the running loop."""

    def __init__(
        self,
        engine: RequestEngine,
        answer_text: Callable[[Stopping], StopText],
        *,
        on_crash: Callable[[BaseException], None],
        times: WatchTimes | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        super().__init__(engine, answer_text, on_crash=on_crash, clock=clock, times=times)
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._survive(), name="engine")

    def start(
        self, listener: Callable[[StepReport], None], *, paused: Callable[[], bool] = never
    ) -> None:
        self.open()
        self._audience.set_result(Audience(listener, paused))

    async def _survive(self) -> None:
        try:
            await self._live()
        except Exception as err:
            self._on_crash(err)
