"""What is due at a time of a clock that a test may own."""

import asyncio
import heapq
from collections.abc import Callable
from contextvars import copy_context
from itertools import count


def loop_s() -> float:
    """The running loop's clock."""
    return asyncio.get_running_loop().time()


class Timer:
    """Something due; `cancel` undoes it."""

    def __init__(self, due_s: float, action: Callable[[], None]) -> None:
        self.due_s = due_s
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Never run it."""
        self.action = None


class Timers:
    """Runs actions when `now_s` reaches their time.

    On the loop's clock this happens by itself. A test that owns the clock calls `run_due` after it
    moved it. Actions run in the context these timers were made in, whoever asked for them.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._handle: asyncio.TimerHandle | None = None
        self._context = copy_context()

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Run `action` in `delay_s`."""
        timer = Timer(self.now_s() + delay_s, action)
        heapq.heappush(self._heap, (timer.due_s, next(self._order), timer))
        if self._heap[0][2] is timer:
            self._arm()
        return timer

    def run_due(self) -> None:
        """Run what is due, in order of time."""
        while self._heap and self._heap[0][0] <= self.now_s():
            timer = heapq.heappop(self._heap)[2]
            if timer.action is not None:
                timer.action()
        self._arm()

    def close(self) -> None:
        """Run nothing more."""
        self._heap.clear()
        self._arm()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._heap:
            delay_s = max(0.001, self._heap[0][0] - self.now_s())
            loop = asyncio.get_running_loop()
            self._handle = loop.call_later(delay_s, self.run_due, context=self._context)
