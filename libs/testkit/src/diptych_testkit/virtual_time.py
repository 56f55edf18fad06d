"""An event loop whose clock jumps to the next timer when there is nothing left to do.

So a test waits for no wall time, and the same program gives the same order of events: every task
has its turn in the order it asked, sets of tasks included (a task's hash is its number). What a
program hands to a thread (`to_thread`, `run_in_executor`) is run at once, in the loop.

Code belongs to a *life* if the context variable `LIFE` says so where it runs. `hold(life)` does to
a life what SIGSTOP does to a process: its callbacks and timers wait until `let_go`, in the order
they were due.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

BEGIN_S = 1000.0
LIFE: ContextVar[str] = ContextVar("LIFE", default="")


class Deadlock(RuntimeError):
    """Nothing is due, ever: everybody waits for somebody."""


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on where it lies in memory."""

    _numbers = count()

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(self._numbers)
        context: Context | None = options.get("context")
        self.life: str = LIFE.get() if context is None else context.get(LIFE, "")
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. It has no files: real sockets, pipes and signals do not work in it."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._now_s = BEGIN_S
        self._held: dict[str, list[asyncio.Handle]] = {}
        self._clock_resolution = 1e-9
        NumberedTask._numbers = count()
        self.set_task_factory(_numbered)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def hold(self, life: str) -> None:
        """Run nothing of `life` from now on."""
        self._held.setdefault(life, [])

    def let_go(self, life: str) -> None:
        """Run what `life` would have done meanwhile, now."""
        self._ready.extend(self._held.pop(life, ()))

    async def end(self, life: str, *, first: Coroutine[Any, Any, None]) -> None:
        """Cancel all of `life` until nothing of it is left, having begun with `first`."""
        self.let_go(life)
        last = self.create_task(first)
        while left := [task for task in self._tasks_of(life) if task is not last]:
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        await last

    def _tasks_of(self, life: str) -> list[NumberedTask]:
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, NumberedTask)]
        return sorted((task for task in tasks if task.life == life), key=hash)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func` in the loop: a thread would not know what time it is."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as err:
            done.set_exception(err)
        return done

    def _run_once(self) -> None:
        if not self._ready:
            self._jump()
        while self._scheduled and self._scheduled[0].when() <= self._now_s:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(timer)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                self._run_or_hold(handle)

    def _run_or_hold(self, handle: asyncio.Handle) -> None:
        if self._held:
            life = handle._context.get(LIFE, "")  # type: ignore[attr-defined]
            if life in self._held:
                self._held[life].append(handle)
                return
        handle._run()

    def _jump(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)._scheduled = False  # type: ignore[attr-defined]
        if self._scheduled:
            self._now_s = max(self._now_s, self._scheduled[0].when())
        elif not self._stopping:  # type: ignore[attr-defined]
            raise Deadlock(f"everybody waits, and nothing is due; held: {sorted(self._held)}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing is counted: cancelled timers are dropped when they are due."""

    def _write_to_self(self) -> None:
        """Nobody sleeps: there is nobody to wake."""

    def _process_events(self, _event_list: Any) -> None:
        """There are none."""


def _numbered(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> NumberedTask:
    return NumberedTask(coro, loop=loop, **options)


def virtual_loop() -> VirtualLoop | None:
    """The running loop, if it is a virtual one."""
    loop = asyncio.get_running_loop()
    return loop if isinstance(loop, VirtualLoop) else None


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """What `main` gives, run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
