"""Cancelling work that may not listen.

nats-py swallows cancellations in places, and so does `asyncio.wait_for` before Python 3.12 when the
answer arrives in the same round of the loop: a single `cancel()` can be lost.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_AGAIN_S = 0.1

T = TypeVar("T")


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel `task`, again and again, until it is done; its outcome is dropped."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN_S)
    if not task.cancelled():
        task.exception()  # seen: asyncio need not complain


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; a cancellation reaches it for certain."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await end(task)
        raise
