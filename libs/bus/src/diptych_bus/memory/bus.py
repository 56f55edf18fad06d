"""The client's part: the port on a `MemoryBroker`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from diptych_bus.answering import Answers
from diptych_bus.lifetime import Lifetime
from diptych_bus.memory.broker import CoreMessage, MemoryBroker, matches
from diptych_bus.memory.bucket import MemoryBucket
from diptych_bus.memory.consumer import Member
from diptych_bus.memory.journal import MemoryJournal
from diptych_bus.memory.stopping import Stopping
from diptych_bus.memory.stream import StoredMessage, unix_ms
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
from diptych_bus.sizes import check_size
from diptych_bus.tracing import context_of, with_context
from diptych_contracts.errors import BusAway
from diptych_contracts.streams import BucketSpec, ConsumerSpec
from diptych_contracts.wire import Message, decode, encode

FLUSH_S = 2.0


def _delivery(message: CoreMessage) -> Delivery:
    return Delivery(message.subject, message.data, message.headers, context_of(message.headers))


def _stored_delivery(message: StoredMessage) -> Delivery:
    return Delivery(message.subject, message.data, message.headers, context_of(message.headers))


class MemoryBus(MemoryJournal):
    """See `port.Bus`; made by `MemoryBroker.connect`."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__(broker, Lifetime())
        self.name = name

    @property
    def connected(self) -> bool:
        """Whether the server is there."""
        return self.line.connected

    @property
    def closed(self) -> "asyncio.Future[Exception | None]":
        """Done when the bus is gone for good; see the port."""
        return self.lifetime.closed

    async def publish(self, subject: str, message: Message) -> None:
        """Send and forget; dropped while the server is away."""
        self._send_core(subject, encode(message), None)

    async def subscribe(self, subject: str, handler: Callable[[Delivery], None]) -> Subscription:
        """Call `handler` for each message on `subject`."""
        return self._listen(subject, lambda message: handler(_delivery(message)))

    async def request(self, subject: str, message: Message, reply: Any, *, timeout_s: float) -> Any:
        """Send `message` and give the answer as type `reply`."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(data: bytes) -> None:
            if self.line.up and not answer.done():
                answer.set_result(data)

        if self.line.dead:
            raise BusAway("this client is dead")
        if not self._send_core(subject, encode(message), take):
            raise BusAway(f"nobody answers on {subject}")
        try:
            async with asyncio.timeout(timeout_s):
                return decode(await answer, reply)
        except TimeoutError as err:
            raise BusAway(f"no answer on {subject} within {timeout_s:g} s") from err

    async def serve(
        self, subject: str, answerer: Callable[[Delivery], Awaitable[Message]]
    ) -> Subscription:
        """Answer requests on `subject`, each in a task of its own."""
        answers = Answers(answerer, self.lifetime)

        def take(message: CoreMessage) -> None:
            if message.reply is not None:
                answers.take(_delivery(message), partial(self._reply, message))

        return self._listen(subject, take, after=answers.close)

    async def store(
        self,
        subject: str,
        message: Message,
        *,
        msg_id: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Stored:
        """Store `message` once; see the port."""
        every = with_context({**(headers or {}), "Nats-Msg-Id": msg_id}) or {}
        return await self._store(subject, encode(message), every, timeout_s)

    async def stored(self, stream: str, seq: int) -> Delivery | None:
        """The message at `seq`, or None if it is gone."""
        await self.round_trip()
        found = self._broker.streams[stream].get(seq)
        if found is None:
            return None
        return _stored_delivery(found)

    async def all_stored(
        self, stream: str, *, subject: str, after_seq: int = 0
    ) -> AsyncIterator[StoredItem]:
        """The messages on `subject` after `after_seq` up to now, in order."""
        await self.round_trip()
        for message in self._broker.streams[stream].after(after_seq):
            if matches(subject, message.subject):
                delivery = _stored_delivery(message)
                yield StoredItem(message.seq, delivery, unix_ms(message.stored_s))

    async def erase(self, stream: str, seq: int) -> None:
        """Delete the message at `seq`; nothing happens if it is gone."""
        await self.round_trip()
        self._broker.streams[stream].erase(seq)

    async def pull(
        self,
        consumer: ConsumerSpec,
        handler: Callable[[Pulled], None],
        *,
        paused: Callable[[], bool],
    ) -> Subscription:
        """Share `consumer`'s messages with the other replicas."""
        await self.round_trip()
        member = Member(handler, paused, self.lifetime, self.line)
        shared = self._broker.consumer(consumer)
        shared.join(member)
        unwatch = self.line.watch(partial(shared.returned, member))
        subscription = Stopping(partial(_each, partial(shared.leave, member), unwatch))
        self.own(subscription)
        return subscription

    def unix_ms(self) -> int:
        """The broker's wall time."""
        return unix_ms(self._broker.timers.now_s())

    async def backlog(self, consumer: ConsumerSpec) -> Backlog:
        """How far `consumer` has come."""
        await self.round_trip()
        return self._broker.consumer(consumer).backlog()

    def bucket(self, spec: BucketSpec, kind: type[M]) -> Bucket[M]:
        """The bucket `spec`, holding values of type `kind`."""
        return MemoryBucket(self._broker.bucket(spec), kind, self)

    async def put_object(self, bucket: str, name: str, data: bytes) -> None:
        """Store a large value under `name`."""
        await self.round_trip()
        self._broker.objects.pop((bucket, name), None)
        self._broker.objects[bucket, name] = bytes(data)

    async def get_object(self, bucket: str, name: str) -> bytes | None:
        """The newest value under `name`."""
        await self.round_trip()
        return self._broker.objects.get((bucket, name))

    async def delete_object(self, bucket: str, name: str) -> None:
        """Remove what is under `name`; nothing happens if it is gone."""
        await self.round_trip()
        self._broker.objects.pop((bucket, name), None)

    async def object_names(self, bucket: str) -> list[str]:
        """The names of all values, the oldest first."""
        await self.round_trip()
        return [name for held, name in self._broker.objects if held == bucket]

    async def close(self) -> None:
        """Flush what is pending (2 s at most) and leave."""
        await self.flush(FLUSH_S)
        await self.kill()

    async def kill(self) -> None:
        """Leave as a killed process does: nothing is flushed, what is un-acknowledged is lost."""
        self._stop_sending()
        self.line.kill()
        for subscription in self._owned:
            await subscription.close()
        self._owned.clear()
        await self.lifetime.finish()

    def _listen(
        self,
        subject: str,
        take: Callable[[CoreMessage], None],
        *,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> Stopping:
        def receive(message: CoreMessage) -> None:
            if subscription.open and self.line.up:
                self.lifetime.call(take, message, subject)

        subscription = Stopping(self._broker.receive(subject, receive, self.line), after)
        self.own(subscription)
        return subscription

    def _send_core(self, subject: str, data: bytes, reply: Callable[[bytes], None] | None) -> bool:
        headers = with_context() or {}
        check_size(subject, data, headers)
        if not self.line.up:
            return True
        return self._broker.send(CoreMessage(subject, data, headers, reply))

    async def _reply(self, message: CoreMessage, data: bytes) -> None:
        assert message.reply is not None
        for delay_s in self._broker.copies(message.subject) if self.line.up else ():
            self._broker.later(delay_s, self.line, partial(message.reply, data))


def _each(*actions: Callable[[], None]) -> None:
    for action in actions:
        action()
