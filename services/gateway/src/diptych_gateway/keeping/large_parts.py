"""What is too large in a stored response: its messages, or its text, each an object of its own.

An object is written once, before what names it, and deleted after. One that is left over (a gateway
died in between, a response expired) goes with its bucket's age.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from diptych_bus.port import Bus
from diptych_contracts.errors import BusAway, Transient
from diptych_contracts.responses import PartRef, StoredResponse
from diptych_contracts.streams import RESPONSE_PARTS
from diptych_contracts.wire import Message, decode, encode
from diptych_gateway.errors import ApiError

CALL_S = 5.0
BYTES_PER_S = 2 * 1024 * 1024
"""The time of a part is reckoned by its size too."""


class ResponseParts:
    """The object bucket, as archives use it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def put(self, name: str, part: Message) -> PartRef:
        """Store `part`; the same again changes nothing. Raises `Transient`."""
        data = encode(part)
        ref = PartRef(name=name, n_bytes=len(data))
        async with _limited(ref):
            await self._bus.put_object(RESPONSE_PARTS, name, data)
        return ref

    async def get(self, ref: PartRef, kind: Any) -> Any:
        """The part that `ref` names, of type `kind`.

        Raises:
            ApiError: it is gone (410).
            Transient: the bus is away.
        """
        async with _limited(ref):
            data = await self._bus.get_object(RESPONSE_PARTS, ref.name)
        if data is None:
            raise ApiError(
                410, f"a part of a response is no longer there: {ref.name}", code="response_expired"
            )
        return decode(data, kind)

    async def delete(self, *refs: PartRef | None) -> None:
        """Remove parts. Raises `Transient`."""
        for ref in refs:
            if ref is not None:
                await self._bus.delete_object(RESPONSE_PARTS, ref.name)

    async def drop(self, ref: PartRef | None) -> None:
        """Remove a part that nothing names, as far as the bus is there."""
        with suppress(Transient, TimeoutError):
            async with asyncio.timeout(CALL_S):
                await self.delete(ref)


def parts_of(stored: StoredResponse) -> tuple[PartRef | None, PartRef | None]:
    """The parts that `stored` names."""
    return stored.turn, stored.answer.text if stored.answer is not None else None


@asynccontextmanager
async def _limited(ref: PartRef) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(CALL_S + ref.n_bytes / BYTES_PER_S):
            yield
    except TimeoutError as err:
        raise BusAway(f"{ref.name}: {ref.n_bytes} bytes took too long") from err
