"""Requests answered, each in a task of its own."""

import asyncio
from collections.abc import Awaitable, Callable

from opentelemetry import context

from diptych_bus.lifetime import Lifetime, log, stop
from diptych_bus.port import Delivery
from diptych_contracts.errors import DiptychError
from diptych_contracts.wire import Message, encode

MAX_ANSWERS = 1024
"""Requests in work at once per subject; beyond, a request is dropped and its sender times out."""


class Answers:
    """The tasks that answer one subject's requests."""

    def __init__(
        self, answerer: Callable[[Delivery], Awaitable[Message]], lifetime: Lifetime
    ) -> None:
        self._answerer = answerer
        self._lifetime = lifetime
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, delivery: Delivery, reply: Callable[[bytes], Awaitable[None]]) -> None:
        """Answer `delivery` with `reply`, in the sender's trace context."""
        if len(self._tasks) >= MAX_ANSWERS:
            log.warning("bus_request_dropped: %s: %d in work", delivery.subject, MAX_ANSWERS)
            return
        task = self._lifetime.start(self._answer(delivery, reply), delivery.subject)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, delivery: Delivery, reply: Callable[[bytes], Awaitable[None]]) -> None:
        if delivery.context is not None:
            context.attach(delivery.context)  # the task's own copy: nothing to detach
        try:
            await reply(encode(await self._answerer(delivery)))
        except DiptychError as err:
            log.warning("bus_request_unanswered: %s: %s", delivery.subject, err)
        except Exception as err:
            self._lifetime.failed(err, f"request on {delivery.subject}")

    async def close(self) -> None:
        """Cancel what is still in work."""
        await stop(*self._tasks)
