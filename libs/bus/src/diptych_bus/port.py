"""The port: what services need of the bus.

Rules every adapter keeps:

- Handlers given to `subscribe`, `follow` and `watch` are plain functions: they only append.
- What heals, heals by itself: pulls, watches, followers and un-acked journal entries survive a
  restart of the server without the caller's help.
- Trace context (W3C) is injected from, and extracted into, the current OpenTelemetry context here
  and nowhere else; token frames carry none.
- A handler that raises a `DiptychError` (a malformed message, say) is logged and skipped; any other
  exception is a bug and completes `closed`.
- A message above `contracts.streams.MAX_MESSAGE_BYTES` is refused with `Permanent` before it is
  sent.
- `BusAway` means *unknown*: the caller retries with the same id until its deadline.
"""

from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from opentelemetry.context import Context

from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import JournalEntry
from diptych_contracts.streams import BucketSpec, ConsumerSpec
from diptych_contracts.wire import Message, decode

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def always() -> bool:
    """True: what is watched is never idle."""
    return True


def never(_: object) -> bool:
    """False: no value is final."""
    return False


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it arrived."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    context: Context | None = None
    """The sender's trace context, if it sent one."""

    def decode(self, kind: Any) -> Any:
        """The message as `kind`. Raises `Permanent` if it is none."""
        return decode(self.data, kind)


@dataclass(frozen=True, slots=True)
class JournalItem:
    """One journal entry at its place in the stream's order."""

    seq: int
    entry: JournalEntry


@dataclass(frozen=True, slots=True)
class Span:
    """The stretch of a stream that is still there; all before it has aged or made room."""

    first_seq: int
    """One beyond `last_seq` if nothing is there."""
    last_seq: int

    def covers(self, after_seq: int) -> bool:
        """Whether all that was stored after `after_seq` is there."""
        return self.first_seq <= after_seq + 1


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One message of a stream at its place."""

    seq: int
    delivery: Delivery
    stored_unix_ms: int
    """When, by the server's clock."""


@dataclass(frozen=True, slots=True)
class Stored:
    """JetStream's word that it has a message."""

    seq: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Backlog:
    """How far the replicas of a service have come with their stream."""

    newest_seq: int
    """The newest message ever stored."""
    done_seq: int
    """Every message up to this was acknowledged, or is gone."""


class Pulled(Protocol):
    """A message from a shared consumer, to be acknowledged once its outcome is durable."""

    delivery: Delivery
    seq: int
    num_delivered: int
    stored_unix_ms: int
    """When, by the server's clock."""

    async def ack(self) -> None:
        """Done: do not deliver it again.

        Not waited for; a server killed within moments forgets it, so handling must be idempotent.
        """
        ...

    async def hold(self) -> None:
        """Still in work: the time until it is delivered again begins anew."""
        ...

    async def nak(self, delay_s: float) -> None:
        """Not now: deliver it again, to anyone, after `delay_s`."""
        ...


@dataclass(frozen=True, slots=True)
class Kept(Generic[M]):
    """A bucket's value and the revision a compare-and-swap must name."""

    key: str
    value: M
    revision: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A key that was deleted or has expired."""

    key: str


class Subscription(Protocol):
    """Something that goes on until it is closed."""

    async def close(self) -> None:
        """No handler is called after this returns."""
        ...


class Messaging(Protocol):
    """Core NATS: not stored."""

    async def publish(self, subject: str, message: Message) -> None:
        """Send and forget. While the server is away the message may be dropped."""
        ...

    async def subscribe(self, subject: str, handler: Callable[[Delivery], None]) -> Subscription:
        """Call `handler` for each message on `subject` (wildcards `*` and `>` allowed)."""
        ...

    async def request(self, subject: str, message: Message, reply: Any, *, timeout_s: float) -> Any:
        """Send `message` and give the answer as type `reply`.

        Raises:
            BusAway: no answer in `timeout_s`, or nobody listens (then at once).
        """
        ...

    async def serve(
        self, subject: str, answerer: Callable[[Delivery], Awaitable[Message]]
    ) -> Subscription:
        """Answer requests on `subject`, each in a task of its own, the trace context set."""
        ...


class Journal(Protocol):
    """Stream `TOKENS` and its republication: the one order that counts."""

    def append(self, gateway: Incarnation, entry: JournalEntry) -> None:
        """Add `entry` to the ring of un-acknowledged entries and send it, in order.

        Never blocks and never drops: entries are sent again, oldest first, until JetStream has
        acknowledged them. Callers pause their sequences while `ring_full` is true.
        """
        ...

    @property
    def ring_full(self) -> bool:
        """Whether the ring has reached its limit."""
        ...

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended so far is acknowledged; False if `timeout_s` ran out."""
        ...

    async def record(self, gateway: Incarnation, entry: JournalEntry, *, timeout_s: float) -> int:
        """Store one entry and give its sequence. Raises `BusAway` if that stays unknown."""
        ...

    async def last_seq(self, gateway: Incarnation) -> int:
        """Sequence of the newest entry of this gateway's journal; 0 if there is none."""
        ...

    async def span(self) -> Span:
        """What is left of all gateways' journals: they are one stream."""
        ...

    def read(
        self, gateway: Incarnation, *, after_seq: int, until_seq: int | None = None
    ) -> AsyncIterator[JournalItem]:
        """The entries with `after_seq` < sequence ≤ `until_seq` (or up to now), in order.

        Those that are there: ask `span` afterwards whether any are missing.
        """
        ...

    async def follow(
        self,
        gateway: Incarnation,
        handler: Callable[[JournalItem], None],
        *,
        after_seq: int | None = None,
        active: Callable[[], bool] = always,
    ) -> Subscription:
        """Call `handler` for each entry after `after_seq` (default: after now), once, in order.

        Reads the republished journal; a gap, a reconnect, or 250 ms of silence while `active()`
        (somebody waits for an entry) is healed from the stream itself.
        """
        ...


class Streams(Protocol):
    """The other streams."""

    async def store(
        self,
        subject: str,
        message: Message,
        *,
        msg_id: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Stored:
        """Store `message`; the same `msg_id` again is a duplicate, not a second message.

        `headers` are for those who may not be able to read the message.

        Raises:
            BusAway: JetStream did not acknowledge; it may have it nevertheless.
            StoreFull: JetStream refused, the stream has no room.
            Transient: JetStream refused for another reason (starting up).
        """
        ...

    async def stored(self, stream: str, seq: int) -> Delivery | None:
        """The message at `seq`, or None if it is gone."""
        ...

    def all_stored(
        self, stream: str, *, subject: str, after_seq: int = 0
    ) -> AsyncIterator[StoredItem]:
        """The messages on `subject` (wildcards allowed) after `after_seq` up to now, in order.

        Raises:
            BusAway: the server does not answer.
        """
        ...

    async def erase(self, stream: str, seq: int) -> None:
        """Delete the message at `seq`; nothing happens if it is gone."""
        ...

    async def pull(
        self,
        consumer: ConsumerSpec,
        handler: Callable[[Pulled], None],
        *,
        paused: Callable[[], bool],
    ) -> Subscription:
        """Share `consumer`'s messages with the other replicas; asks for none while `paused()`.

        One that is not acknowledged `max_deliver` times is delivered no more; that is said, as
        `advisories.Undelivered`, on `subjects.undelivered` (at the latest when somebody pulls).
        """
        ...

    async def backlog(self, consumer: ConsumerSpec) -> Backlog:
        """How far `consumer` has come. Raises `Transient` where nobody pulled from it yet."""
        ...


class Bucket(Protocol[M]):
    """One key-value bucket of values of one type."""

    async def get(self, key: str) -> Kept[M] | None:
        """The newest value."""
        ...

    async def create(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        """Write a key that must not exist; gives its revision. Raises `Conflict`."""
        ...

    async def update(self, key: str, value: M, revision: int, *, ttl_s: float | None = None) -> int:
        """Compare-and-swap. Raises `Conflict` if `revision` is not the newest."""
        ...

    async def put(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        """Write, whatever is there."""
        ...

    async def delete(self, key: str) -> None:
        """Remove a key and its history."""
        ...

    async def values(self) -> list[Kept[M]]:
        """All values as they are now; one that cannot be read is left out.

        Unlike a watch it leaves nothing behind at the server, and needs the right to read only.
        """
        ...

    async def watch(
        self, handler: Callable[[Kept[M] | Gone], None], *, final: Callable[[M], bool] = never
    ) -> Subscription:
        """Call `handler` for every present key (before this returns), then for each change.

        A value that is `final` is told, and its key then forgotten: that it expires is not told.
        After a reconnect the bucket is listed again: a value may be seen twice, a change is never
        missed. Expired keys are reported as `Gone` at the next listing at the latest.
        """
        ...


class Bus(Messaging, Journal, Streams, Protocol):
    """Everything."""

    @property
    def connected(self) -> bool:
        """Whether the server is there, as far as this client knows."""
        ...

    @property
    def closed(self) -> "Future[Exception | None]":
        """Done when the bus is gone for good.

        None after `close`; the reason where the client gave up or a handler had a bug: the process
        should end.
        """
        ...

    def unix_ms(self) -> int:
        """The server's wall time, as far as this client knows it: the one clock all share."""
        ...

    def bucket(self, spec: BucketSpec, kind: type[M]) -> Bucket[M]:
        """The bucket `spec`, holding values of type `kind`."""
        ...

    async def put_object(self, bucket: str, name: str, data: bytes) -> None:
        """Store a large value under `name`."""
        ...

    async def get_object(self, bucket: str, name: str) -> bytes | None:
        """The newest value under `name`."""
        ...

    async def delete_object(self, bucket: str, name: str) -> None:
        """Remove what is under `name`, all of it; nothing happens if it is gone."""
        ...

    async def object_names(self, bucket: str) -> list[str]:
        """The names of all values, the oldest first."""
        ...

    async def close(self) -> None:
        """Flush what is pending (2 s at most) and leave."""
        ...
