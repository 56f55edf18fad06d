"""Notices that the server's streams are no longer those that this process began with.

A server that comes back with an empty disk, and an operator who deletes a stream or a bucket, take
records, journals and registrations away, and with them what every member remembers of the bus:
cursors, revisions, dedupe ids. Streams made anew count from 1, so a follower that stands at 5,000
would skip everything. The bus is then gone for good: a process that starts anew declares what is
missing, and inherits nothing.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from diptych_bus.jetstream.answers import ApiError, api
from diptych_bus.jetstream.connection import Connection
from diptych_bus.stream_names import DELETED
from diptych_contracts.errors import Transient

LOOK_S = 5.0
PAUSE_S = 0.5
"""Before a second look, and after one that failed."""
_STREAM_NOT_FOUND = 10059
_NAMED = 8


class StoreIdentity:
    """Ends the connection's lifetime if a stream is missing or another one; made by `start`."""

    def __init__(self, connection: Connection, born: Mapping[str, str]) -> None:
        self._connection = connection
        self._born = born
        self._wake = asyncio.Event()

    @classmethod
    async def start(cls, connection: Connection, streams: Iterable[str], *, until_s: float) -> None:
        """Remember `streams` as they are, and look again when one is deleted or after a reconnect.

        Raises:
            Transient: JetStream does not answer until `until_s` of the event loop's clock.
        """
        born = await _born(connection, frozenset(streams), within_s=_left_s(until_s))
        self = cls(connection, born)
        await connection.listen(DELETED, lambda _: self._wake.set())
        connection.watch_link(up=self._wake.set)
        connection.lifetime.start(self._watch(), "store identity")

    async def _watch(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                if lost := await self._lost():
                    await asyncio.sleep(PAUSE_S)
                    lost = await self._lost()
            except Transient:
                await asyncio.sleep(PAUSE_S)
                self._wake.set()
                continue
            if lost:
                which = ", ".join(lost[:_NAMED]) + (", ..." if len(lost) > _NAMED else "")
                text = f"the server's store is another one: {len(lost)} streams are gone ({which})"
                self._connection.lifetime.end(Transient(text))
                return

    async def _lost(self) -> list[str]:
        born = await _born(self._connection, self._born.keys(), within_s=LOOK_S)
        return sorted(name for name, stamp in self._born.items() if born.get(name) != stamp)


async def there(connection: Connection, streams: Iterable[str], *, until_s: float) -> None:
    """Wait until all `streams` are there, for a process that may not create them.

    Raises:
        Transient: some are not, at `until_s` of the event loop's clock.
    """
    loop = asyncio.get_running_loop()
    wanted = frozenset(streams)
    while missing := sorted(wanted - (await _listed(connection, _left_s(until_s))).keys()):
        if loop.time() + PAUSE_S > until_s:
            which = ", ".join(missing[:_NAMED])
            raise Transient(f"nobody has created {which} on the bus: does a supervisor run?")
        await asyncio.sleep(PAUSE_S)


def _left_s(until_s: float) -> float:
    return max(LOOK_S, until_s - asyncio.get_running_loop().time())


async def _born(
    connection: Connection, streams: Iterable[str], *, within_s: float
) -> dict[str, str]:
    """When each of `streams` that exists was created."""
    found = await _listed(connection, within_s)
    born = {name: found[name] for name in streams if name in found}
    for name in frozenset(streams) - born.keys():  # a cluster leaves out what does not answer
        try:
            info = await api(connection, f"STREAM.INFO.{name}", {}, timeout_s=within_s)
        except ApiError as err:
            if err.err_code != _STREAM_NOT_FOUND:
                raise Transient(f"stream {name}: {err.description}") from err
        else:
            born[name] = str(info["created"])
    return born


async def _listed(connection: Connection, within_s: float) -> dict[str, str]:
    found: dict[str, str] = {}
    offset = 0
    while True:
        page = await _page(connection, offset, within_s)
        streams = page.get("streams") or []
        found.update({str(s["config"]["name"]): str(s["created"]) for s in streams})
        offset += len(streams)
        if not streams or offset >= int(page.get("total", 0)):
            return found


async def _page(connection: Connection, offset: int, within_s: float) -> dict[str, Any]:
    try:
        return await api(connection, "STREAM.LIST", {"offset": offset}, timeout_s=within_s)
    except ApiError as err:
        raise Transient(f"cannot list streams: {err.description}") from err
