"""Key-value buckets: reads are direct, writes are publishes of our own.

nats-py's writes take no TTL, and lose the answer with the connection. A write here carries an id: a
conflict whose winner has our id is a success whose answer was lost.
"""

import logging
import math
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, TypeVar
from uuid import uuid4

from nats.aio.msg import Msg

from diptych_bus.jetstream import direct
from diptych_bus.jetstream.answers import stored
from diptych_bus.jetstream.connection import Connection
from diptych_bus.jetstream.declaring import bucket_stream
from diptych_bus.jetstream.watching import Watch, is_gone
from diptych_bus.port import Gone, Kept, Subscription, never
from diptych_contracts.errors import Conflict, Permanent
from diptych_contracts.streams import BucketSpec
from diptych_contracts.wire import Message, decode, encode

M = TypeVar("M", bound=Message)

log = logging.getLogger("diptych.bus")

CALL_S = 5.0
"""Deadline of one call: a restart of the server fits in."""
TOMBSTONE_TTL_S = 1


def ttl_header(ttl_s: float | None) -> dict[str, str]:
    """The TTL as the server takes it: whole seconds, at least one (it refuses less)."""
    return {} if ttl_s is None else {"Nats-TTL": f"{max(1, math.ceil(ttl_s))}s"}


class JetStreamBucket(Generic[M]):
    """See `port.Bucket`."""

    def __init__(self, connection: Connection, spec: BucketSpec, kind: type[M]) -> None:
        self._connection = connection
        self._name = spec.name
        self._stream = bucket_stream(spec.name)
        self._kind = kind

    async def get(self, key: str) -> Kept[M] | None:
        """The newest value."""
        msg = await self._last(key)
        if msg is None or is_gone(msg) or not direct.genuine(msg):
            return None
        return Kept(key, decode(msg.data, self._kind), direct.seq_of(msg))

    async def create(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        """Write a key that must not exist; gives its revision. Raises `Conflict`."""
        data = encode(value)
        try:
            return await self._swap(key, data, 0, ttl_s)
        except Conflict:
            last = await self._last(key)
            if last is None or not is_gone(last):
                raise
            return await self._swap(key, data, direct.seq_of(last), ttl_s)

    async def update(self, key: str, value: M, revision: int, *, ttl_s: float | None = None) -> int:
        """Compare-and-swap. Raises `Conflict` if `revision` is not the newest."""
        return await self._swap(key, encode(value), revision, ttl_s)

    async def put(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        """Write, whatever is there."""
        return await self._write(key, encode(value), ttl_header(ttl_s))

    async def delete(self, key: str) -> None:
        """Remove a key and its history; the tombstone goes by itself after a second."""
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", **ttl_header(TOMBSTONE_TTL_S)}
        await self._write(key, b"", headers)

    async def values(self) -> list[Kept[M]]:
        """All values as they are now."""
        found: dict[str, Kept[M]] = {}
        messages = direct.all_on(self._connection, self._stream, self._subject(">"), after_seq=0)
        async with aclosing(messages):
            async for msg in messages:
                key = (msg.headers or {})["Nats-Subject"].removeprefix(self._subject(""))
                found.pop(key, None)
                if is_gone(msg) or not direct.genuine(msg):
                    continue
                try:
                    value = decode(msg.data, self._kind)
                except Permanent as err:
                    log.warning("bucket_value_skipped: %s: %s", key, err)
                    continue
                found[key] = Kept(key, value, direct.seq_of(msg))
        return list(found.values())

    async def watch(
        self, handler: Callable[[Kept[M] | Gone], None], *, final: Callable[[M], bool] = never
    ) -> Subscription:
        """Call `handler` for every present key (before this returns), then for each change."""
        watch = Watch(self._connection, self._name, self._kind, handler=handler, final=final)
        return await watch.start()

    def _subject(self, key: str) -> str:
        return f"$KV.{self._name}.{key}"

    async def _last(self, key: str) -> Msg | None:
        return await direct.last_on(self._connection, self._stream, self._subject(key))

    async def _swap(self, key: str, data: bytes, revision: int, ttl_s: float | None) -> int:
        expected = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        write_id = uuid4().hex
        try:
            return await self._write(key, data, {**expected, **ttl_header(ttl_s)}, write_id)
        except Conflict:
            last = await self._last(key)
            if last is not None and (last.headers or {}).get("Nats-Msg-Id") == write_id:
                return direct.seq_of(last)
            raise

    async def _write(
        self, key: str, data: bytes, headers: dict[str, str], write_id: str | None = None
    ) -> int:
        done = await stored(
            self._connection,
            self._subject(key),
            data,
            headers={"Nats-Msg-Id": write_id or uuid4().hex, **headers},
            timeout_s=CALL_S,
        )
        return done.seq
