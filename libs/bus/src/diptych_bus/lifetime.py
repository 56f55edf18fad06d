"""A bus connection's end, and what a failing handler does to it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from diptych_contracts.errors import DiptychError

T = TypeVar("T")

CANCEL_AGAIN_S = 0.2
"""A library may swallow a cancellation (see `heeding`)."""

log = logging.getLogger("diptych.bus")


class Lifetime:
    """Completes `closed` once: with None after a close, else with the reason."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def end(self, reason: Exception | None = None) -> None:
        """The connection is gone for good; only the first reason counts."""
        if not self.closed.done():
            self.closed.set_result(reason)

    def call(self, handler: Callable[[T], None], item: T, what: str) -> None:
        """Call `handler(item)`: our own errors are logged and skipped, others are bugs."""
        try:
            handler(item)
        except Exception as err:
            self.failed(err, what)

    def failed(self, err: Exception, what: str) -> None:
        """Judge an exception that came out of a handler."""
        if isinstance(err, DiptychError):
            log.warning("bus_message_skipped: %s: %s", what, err)
        else:
            log.error("bus_handler_failed: %s", what, exc_info=err)
            self.end(err)

    def start(self, work: Coroutine[Any, Any, None], what: str) -> "asyncio.Task[None]":
        """A task that goes on until it is stopped; an exception in it is a bug."""

        def done(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(err := task.exception(), Exception):
                log.error("bus_task_failed: %s", what, exc_info=err)
                self.end(err)

        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    async def finish(self) -> None:
        """Complete `closed` and stop every task that still goes on."""
        self.end()
        await stop(*self._tasks)


async def woken(wake: asyncio.Event, timeout_s: float) -> None:
    """Wait for `wake` (and reset it), at most `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await wake.wait()
    except TimeoutError:
        pass
    wake.clear()


async def heeding(work: Awaitable[T]) -> T:
    """Await `work`, which may swallow a cancellation, without losing it.

    nats-py swallows it while flushing, and so does `wait_for` before Python 3.12 if the answer
    (or the failure) arrives in the same round of the loop: the cancelled task would go on for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        return await work
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


async def within(timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which may swallow a cancellation and then try again for ever.

    Raises:
        TimeoutError: it was not done in `timeout_s`; it is no more at work.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        await stop(task)
        if not task.cancelled():
            task.exception()  # seen: what it says after its time is of no use


async def stop(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel `tasks` and wait until they are gone."""
    going = {task for task in tasks if task is not None}
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=CANCEL_AGAIN_S)
