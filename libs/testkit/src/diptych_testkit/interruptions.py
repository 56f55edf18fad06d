"""Members that stop exactly between two steps: killed or frozen before or after one bus call.

    broker = CuttingBroker()
    async with small_fleet(broker) as fleet:
        ...
        cut = broker.kill_before("s1", lambda call: call.is_a(PrefillJob))
        await cut.reached.wait()      # s1 asks for it: from here on it does and hears nothing
        await fleet.kill("s1")        # its task ends too

A killed member's calls never return and nothing arrives at it. A frozen one (in virtual time only)
does nothing at all until `thaw`, as after SIGSTOP: it wakes with everything it remembered. Beside
these, a call can be lost on its way, or only noted.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, Literal, TypeVar

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.port import (
    Bucket,
    Delivery,
    Gone,
    JournalItem,
    Kept,
    M,
    Pulled,
    Stored,
    Subscription,
    always,
    never,
)
from diptych_bus.ring import Unacked
from diptych_contracts.errors import BusAway
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import JournalEntry
from diptych_contracts.streams import BucketSpec, ConsumerSpec
from diptych_contracts.wire import Message, decode
from diptych_testkit.virtual_time import virtual_loop

T = TypeVar("T")
NEVER_S = 120.0


@dataclass(frozen=True, slots=True)
class Call:
    """One thing a member does with its bus."""

    kind: str
    """`publish`, `request`, `answer`, `append`, `stored` (what was appended), `record`, `store`,
    `erase`, `ack`, `nak`, `get`, `create`, `update`, `put` or `delete`."""
    subject: str
    """Subject, `bucket/key`, or stream."""
    message: Any = None

    def is_a(self, *types: type[Message], kind: str = "") -> bool:
        """Whether it carries a message of one of `types` (and is of `kind`)."""
        return isinstance(self.message, types) and kind in ("", self.kind)


Where = Callable[[Call], bool]


class Deed(Enum):
    """What happens at a place."""

    KILL = auto()
    FREEZE = auto()
    LOSE = auto()
    """The call is not made, and its maker does not notice (or hears `BusAway`)."""
    NOTE = auto()
    """Nothing; a test waits for it."""


class Moment(asyncio.Event):
    """What a test waits for: two minutes if it never comes, not until all tests are stopped."""

    async def wait(self) -> Literal[True]:
        async with asyncio.timeout(NEVER_S):
            return await super().wait()


class Cut:
    """One place at which something happens to one member."""

    def __init__(self, member: str, where: Where, deed: Deed, *, nth: int, after: bool) -> None:
        self.member = member
        self.deed = deed
        self.after = after
        self.reached = Moment()
        self.call: Call | None = None
        """Where it happened."""
        self._where = where
        self._left = nth

    def strikes(self, call: Call, *, after: bool) -> bool:
        """Whether this is the place."""
        if self.reached.is_set() or after is not self.after or not self._where(call):
            return False
        self._left -= 1
        if self._left:
            return False
        self.call = call
        self.reached.set()
        return True


class CuttingBroker(MemoryBroker):
    """A memory broker whose members can be stopped between two steps."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.cuts: list[Cut] = []

    def connect(self, name: str) -> MemoryBus:
        """A bus of its own for one member."""
        return CuttingBus(self, name)

    def kill_before(self, member: str, where: Where, *, nth: int = 1) -> Cut:
        """`member` dies instead of making its `nth` call at `where`."""
        return self._cut(Cut(member, where, Deed.KILL, nth=nth, after=False))

    def kill_after(self, member: str, where: Where, *, nth: int = 1) -> Cut:
        """`member` dies before it learns that its `nth` call at `where` was made."""
        return self._cut(Cut(member, where, Deed.KILL, nth=nth, after=True))

    def freeze_before(self, member: str, where: Where, *, nth: int = 1) -> Cut:
        """`member` freezes just before its `nth` call at `where`."""
        return self._cut(Cut(member, where, Deed.FREEZE, nth=nth, after=False))

    def freeze_after(self, member: str, where: Where, *, nth: int = 1) -> Cut:
        """`member` freezes before it learns that its `nth` call at `where` was made."""
        return self._cut(Cut(member, where, Deed.FREEZE, nth=nth, after=True))

    def lose(self, member: str, where: Where, *, nth: int = 1) -> Cut:
        """`member`'s `nth` call at `where` gets lost: a `publish`, `append` or `ack`."""
        return self._cut(Cut(member, where, Deed.LOSE, nth=nth, after=False))

    def note(self, member: str, where: Where, *, nth: int = 1) -> Cut:
        """Tell when `member` has made its `nth` call at `where`."""
        return self._cut(Cut(member, where, Deed.NOTE, nth=nth, after=True))

    def _cut(self, cut: Cut) -> Cut:
        self.cuts.append(cut)
        return cut


class CuttingBus(MemoryBus):
    """A memory bus that asks its broker's cuts before and after each call."""

    def __init__(self, broker: CuttingBroker, name: str) -> None:
        super().__init__(broker, name)
        self._cuts = broker.cuts
        self._dead = False
        self._ended = asyncio.Event()

    def check(self, call: Call, *, after: bool) -> bool:
        """Stop if this is a cut's place; says whether the call is lost."""
        lost = False
        for cut in self._cuts if not self._dead else ():
            if cut.member == self.name and cut.strikes(call, after=after):
                lost = lost or cut.deed is Deed.LOSE
                self._suffer(cut.deed)
        return lost

    def _suffer(self, deed: Deed) -> None:
        if deed is Deed.KILL:
            self._dead = True
            self.line.kill()
        elif deed is Deed.FREEZE:
            loop = virtual_loop()
            assert loop is not None, "members freeze in virtual time only"
            loop.hold(self.name)

    async def step(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Make a call, unless this member is stopped before it."""
        self.check(call, after=False)
        await self.go_on()
        done = await act()
        self.check(call, after=True)
        await self.go_on()
        return done

    async def go_on(self) -> None:
        """Wait while this member is stopped; for ever, if it is dead."""
        await asyncio.sleep(0)  # not before `let_go`, if it is frozen
        if self._dead:
            await self._ended.wait()  # what it would still say on its way out is not heard
            raise BusAway(f"{self.name} is dead")

    async def kill(self) -> None:
        """Leave as a killed process does; see `MemoryBus.kill`."""
        self._dead = True
        self._ended.set()
        await super().kill()

    def guarded(self, handler: Callable[[T], None]) -> Callable[[T], None]:
        """`handler`, called only while this member lives."""

        def take(item: T) -> None:
            if not self._dead:
                handler(item)

        return take

    # Core messages

    async def publish(self, subject: str, message: Message) -> None:
        """Send and forget; what a stopped member would send is dropped."""
        lost = self.check(Call("publish", subject, message), after=False)
        if not (self._dead or lost):
            await super().publish(subject, message)

    async def subscribe(self, subject: str, handler: Callable[[Delivery], None]) -> Subscription:
        return await super().subscribe(subject, self.guarded(handler))

    async def request(self, subject: str, message: Message, reply: Any, *, timeout_s: float) -> Any:
        ask = super().request
        return await self.step(
            Call("request", subject, message),
            lambda: ask(subject, message, reply, timeout_s=timeout_s),
        )

    async def serve(
        self, subject: str, answerer: Callable[[Delivery], Awaitable[Message]]
    ) -> Subscription:
        async def answer(delivery: Delivery) -> Message:
            await self.go_on()
            message = await answerer(delivery)
            call = Call("answer", subject, message)
            self.check(call, after=False)
            await self.go_on()
            self.check(call, after=True)
            return message

        return await super().serve(subject, answer)

    # The journal

    def append(self, gateway: Incarnation, entry: JournalEntry) -> None:
        lost = self.check(Call("append", gateway, entry), after=False)
        if not (self._dead or lost):
            super().append(gateway, entry)

    async def record(self, gateway: Incarnation, entry: JournalEntry, *, timeout_s: float) -> int:
        write = super().record
        return await self.step(
            Call("record", gateway, entry), lambda: write(gateway, entry, timeout_s=timeout_s)
        )

    async def follow(
        self,
        gateway: Incarnation,
        handler: Callable[[JournalItem], None],
        *,
        after_seq: int | None = None,
        active: Callable[[], bool] = always,
    ) -> Subscription:
        return await super().follow(gateway, self.guarded(handler), after_seq=after_seq)

    async def read(
        self, gateway: Incarnation, *, after_seq: int, until_seq: int | None = None
    ) -> AsyncIterator[JournalItem]:
        async for item in super().read(gateway, after_seq=after_seq, until_seq=until_seq):
            await self.go_on()
            yield item

    def _send_one(self, entry: Unacked) -> None:
        if self._dead:
            return
        super()._send_one(entry)
        self.check(Call("stored", entry.subject, decode(entry.data, JournalEntry)), after=True)

    # Streams

    async def store(
        self,
        subject: str,
        message: Message,
        *,
        msg_id: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Stored:
        keep = super().store
        return await self.step(
            Call("store", subject, message),
            lambda: keep(subject, message, msg_id=msg_id, timeout_s=timeout_s, headers=headers),
        )

    async def erase(self, stream: str, seq: int) -> None:
        drop = super().erase
        await self.step(Call("erase", stream), lambda: drop(stream, seq))

    async def pull(
        self,
        consumer: ConsumerSpec,
        handler: Callable[[Pulled], None],
        *,
        paused: Callable[[], bool],
    ) -> Subscription:
        guarded = self.guarded(handler)
        return await super().pull(
            consumer,
            lambda pulled: guarded(CuttingPulled(self, pulled, consumer.stream)),
            paused=lambda: self._dead or paused(),
        )

    def bucket(self, spec: BucketSpec, kind: type[M]) -> Bucket[M]:
        return CuttingBucket(self, spec.name, super().bucket(spec, kind))


class CuttingPulled:
    """See `port.Pulled`."""

    def __init__(self, bus: CuttingBus, pulled: Pulled, stream: str) -> None:
        self._bus = bus
        self._pulled = pulled
        self._stream = stream
        self.delivery: Delivery = pulled.delivery
        self.seq: int = pulled.seq
        self.num_delivered: int = pulled.num_delivered
        self.stored_unix_ms: int = pulled.stored_unix_ms

    async def ack(self) -> None:
        lost = self._bus.check(Call("ack", self._stream), after=False)
        await self._bus.go_on()
        if not lost:
            await self._pulled.ack()
            self._bus.check(Call("ack", self._stream), after=True)

    async def hold(self) -> None:
        await self._bus.step(Call("hold", self._stream), self._pulled.hold)

    async def nak(self, delay_s: float) -> None:
        await self._bus.step(Call("nak", self._stream), lambda: self._pulled.nak(delay_s))


class CuttingBucket(Generic[M]):
    """See `port.Bucket`."""

    def __init__(self, bus: CuttingBus, name: str, bucket: Bucket[M]) -> None:
        self._bus = bus
        self._name = name
        self._bucket = bucket

    def _call(self, kind: str, key: str, value: Any = None) -> Call:
        return Call(kind, f"{self._name}/{key}", value)

    async def get(self, key: str) -> Kept[M] | None:
        return await self._bus.step(self._call("get", key), lambda: self._bucket.get(key))

    async def create(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        return await self._bus.step(
            self._call("create", key, value),
            lambda: self._bucket.create(key, value, ttl_s=ttl_s),
        )

    async def update(self, key: str, value: M, revision: int, *, ttl_s: float | None = None) -> int:
        return await self._bus.step(
            self._call("update", key, value),
            lambda: self._bucket.update(key, value, revision, ttl_s=ttl_s),
        )

    async def put(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        return await self._bus.step(
            self._call("put", key, value), lambda: self._bucket.put(key, value, ttl_s=ttl_s)
        )

    async def delete(self, key: str) -> None:
        await self._bus.step(self._call("delete", key), lambda: self._bucket.delete(key))

    async def values(self) -> list[Kept[M]]:
        return await self._bus.step(self._call("values", "*"), self._bucket.values)

    async def watch(
        self, handler: Callable[[Kept[M] | Gone], None], *, final: Callable[[M], bool] = never
    ) -> Subscription:
        return await self._bucket.watch(self._bus.guarded(handler), final=final)


def state_of(call: Call) -> str:
    """The state of the record a call writes; empty if it writes none."""
    return str(getattr(call.message, "state", ""))
