"""Calls that outlast an absence of the bus."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from diptych_contracts.errors import Transient

PAUSE_S = 0.1
"""Between two tries."""

T = TypeVar("T")


async def until_back(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat `call` while the bus is away: one that may be made twice."""
    while True:
        try:
            return await call()
        except Transient:
            await asyncio.sleep(PAUSE_S)
