"""`JetStreamBus`: the port on a NATS server with JetStream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing

from diptych_bus.access import Access
from diptych_bus.jetstream import direct, objects
from diptych_bus.jetstream.answers import NOT_FOUND, ApiError, api, stored
from diptych_bus.jetstream.appending import Appender
from diptych_bus.jetstream.buckets import JetStreamBucket
from diptych_bus.jetstream.connection import Connection
from diptych_bus.jetstream.declaring import backlog, declare
from diptych_bus.jetstream.journal import JetStreamJournal
from diptych_bus.jetstream.messaging import JetStreamMessaging, delivery_of
from diptych_bus.jetstream.pulling import Puller
from diptych_bus.jetstream.store_identity import StoreIdentity, there
from diptych_bus.permissions.granting import needed_streams
from diptych_bus.permissions.table import RIGHTS
from diptych_bus.port import (
    Backlog,
    Bucket,
    Delivery,
    M,
    Pulled,
    Stored,
    StoredItem,
    Subscription,
)
from diptych_bus.stream_names import bucket_stream, object_stream
from diptych_bus.tracing import with_context
from diptych_contracts.streams import (
    BUCKETS,
    OBJECT_BUCKETS,
    STREAMS,
    BucketSpec,
    ConsumerSpec,
    StreamSpec,
)
from diptych_contracts.wire import Message, encode

_KEPT = [bucket_stream(spec.name) for spec in BUCKETS]
_KEPT += [object_stream(spec.name) for spec in OBJECT_BUCKETS]
FLUSH_S = 2.0
CALL_S = 5.0


class JetStreamBus(JetStreamMessaging, JetStreamJournal):
    """See `port.Bus`; made by `connect`."""

    def __init__(self, connection: Connection, appender: Appender) -> None:
        JetStreamMessaging.__init__(self, connection)
        JetStreamJournal.__init__(self, connection, appender)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        wait_s: float,
        streams: Iterable[StreamSpec] = STREAMS,
        replicas: int = 1,
        access: Access | None = None,
    ) -> "JetStreamBus":
        """Connect, trying for `wait_s`, and create missing streams, buckets and objects.

        Each is kept by `replicas` servers of a cluster: set by whoever creates it. With `access`
        only a supervisor creates them; others wait until those are there that they may use.

        Raises:
            BusAway: nobody answers at `url`.
            Transient: JetStream is off or not ready, or nobody creates what is missing.
        """
        end_s = asyncio.get_running_loop().time() + wait_s
        connection = await Connection.open(url, name=name, wait_s=wait_s, access=access)
        names = [spec.name for spec in streams] + _KEPT
        try:
            if access is None or RIGHTS[access.role].creates:
                await declare(
                    connection,
                    streams,
                    BUCKETS,
                    OBJECT_BUCKETS,
                    replicas=replicas,
                    until_s=end_s,
                )
            else:
                names = sorted(needed_streams(RIGHTS[access.role]))
                await there(connection, names, until_s=end_s)
            await StoreIdentity.start(connection, names, until_s=end_s)
            return cls(connection, await Appender.start(connection))
        except BaseException:
            await connection.close()
            raise

    @property
    def connected(self) -> bool:
        """Whether the server is there, as far as this client knows."""
        return self._connection.connected

    @property
    def closed(self) -> "asyncio.Future[Exception | None]":
        """Done when the bus is gone for good; see the port."""
        return self._connection.lifetime.closed

    async def store(
        self,
        subject: str,
        message: Message,
        *,
        msg_id: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Stored:
        """Store `message` once. `duplicate` may also mean an own earlier try within this call."""
        every = with_context({**(headers or {}), "Nats-Msg-Id": msg_id}) or {}
        return await stored(
            self._connection, subject, encode(message), headers=every, timeout_s=timeout_s
        )

    async def stored(self, stream: str, seq: int) -> Delivery | None:
        """The message at `seq`, or None if it is gone."""
        msg = await direct.by_seq(self._connection, stream, seq)
        if msg is None:
            return None
        return delivery_of(msg, subject=(msg.headers or {})["Nats-Subject"])

    async def all_stored(
        self, stream: str, *, subject: str, after_seq: int = 0
    ) -> AsyncIterator[StoredItem]:
        """The messages on `subject` after `after_seq` up to now, in order."""
        messages = direct.all_on(self._connection, stream, subject, after_seq=after_seq)
        async with aclosing(messages):
            async for msg in messages:
                delivery = delivery_of(msg, subject=(msg.headers or {})["Nats-Subject"])
                yield StoredItem(direct.seq_of(msg), delivery, direct.stored_ms_of(msg))

    async def erase(self, stream: str, seq: int) -> None:
        """Delete the message at `seq`; nothing happens if it is gone."""
        body = {"seq": seq, "no_erase": True}
        try:
            await api(self._connection, f"STREAM.MSG.DELETE.{stream}", body, timeout_s=CALL_S)
        except ApiError as err:
            if err.err_code not in NOT_FOUND:
                raise err.judged(f"cannot erase {seq} of {stream}") from err

    async def pull(
        self,
        consumer: ConsumerSpec,
        handler: Callable[[Pulled], None],
        *,
        paused: Callable[[], bool],
    ) -> Subscription:
        """Share `consumer`'s messages with the other replicas."""
        return await Puller(self._connection, consumer, handler=handler, paused=paused).start()

    def unix_ms(self) -> int:
        """The server's wall time, as far as this client knows it."""
        return self._connection.server_clock.unix_ms()

    async def backlog(self, consumer: ConsumerSpec) -> Backlog:
        """How far `consumer` has come."""
        return await backlog(self._connection, consumer, timeout_s=CALL_S)

    def bucket(self, spec: BucketSpec, kind: type[M]) -> Bucket[M]:
        """The bucket `spec`, holding values of type `kind`."""
        return JetStreamBucket(self._connection, spec, kind)

    async def put_object(self, bucket: str, name: str, data: bytes) -> None:
        """Store a large value under `name`."""
        await objects.put_object(self._connection, bucket, name, data)

    async def get_object(self, bucket: str, name: str) -> bytes | None:
        """The newest value under `name`."""
        return await objects.get_object(self._connection, bucket, name)

    async def delete_object(self, bucket: str, name: str) -> None:
        """Remove what is under `name`; nothing happens if it is gone."""
        await objects.delete_object(self._connection, bucket, name)

    async def object_names(self, bucket: str) -> list[str]:
        """The names of all values, the oldest first."""
        return await objects.object_names(self._connection, bucket)

    async def close(self) -> None:
        """Flush what is pending (2 s at most) and leave."""
        await self._appender.flush(FLUSH_S)
        await self._appender.close()
        await self._connection.close()
