"""Doing something again and again, on time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from diptych_contracts.errors import Transient
from diptych_telemetry import logger

log = logger(__name__)


async def every(
    period_s: float,
    act: Callable[[], Awaitable[None]],
    *,
    now_s: Callable[[], float] | None = None,
) -> NoReturn:
    """Await `act()` now and then every `period_s`, until cancelled.

    Turns keep their beat: a slow one makes the next come sooner, turns missed altogether are left
    out. `Transient` is logged and the next turn tries again; any other error ends the loop.
    The clock is the event loop's, unless `now_s` is given.
    """
    now_s = now_s or asyncio.get_running_loop().time
    due_s = now_s()
    while True:
        try:
            await act()
        except Transient as err:
            log.warning("turn_failed", error=str(err))
        due_s = max(due_s + period_s, now_s())
        await asyncio.sleep(due_s - now_s())
