"""One durable pull consumer: who gets which message next, and what happens without an ack."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diptych_bus.lifetime import Lifetime
from diptych_bus.memory.line import Line
from diptych_bus.memory.stream import MemoryStream, StoredMessage, unix_ms
from diptych_bus.memory.timers import Timer, Timers
from diptych_bus.port import Backlog, Delivery, Pulled
from diptych_bus.tracing import context_of
from diptych_contracts.streams import ConsumerSpec

PAUSED_LOOK_S = 0.05
ASKED_S = 1.0
"""How long a member's request for messages stands, as JetStream's."""


@dataclass(slots=True, eq=False)
class Member:
    """One replica that shares the consumer."""

    handler: Callable[[Pulled], None]
    paused: Callable[[], bool]
    lifetime: Lifetime
    line: Line
    unheard: int = 0
    """Messages sent to it that it has not taken in: a frozen one hoards what it asked for."""
    heard_s: float = 0.0
    """When it last took one in, or was sent the first that it has not."""


class PulledMessage:
    """See `port.Pulled`."""

    def __init__(
        self, consumer: "MemoryConsumer", message: StoredMessage, line: Line, *, deliveries: int
    ) -> None:
        self._consumer = consumer
        self._line = line
        self.seq: int = message.seq
        self.num_delivered: int = deliveries
        self.stored_unix_ms: int = unix_ms(message.stored_s)
        self.delivery: Delivery = Delivery(
            message.subject, message.data, message.headers, context_of(message.headers)
        )

    async def ack(self) -> None:
        """Done: never deliver it again."""
        if self._line.up and not self._consumer.loses_ack():
            self._consumer.ack(self.seq)

    async def hold(self) -> None:
        """Still in work: the time until it is delivered again begins anew."""
        if self._line.up and not self._consumer.loses_ack():
            self._consumer.hold(self.seq)

    async def nak(self, delay_s: float) -> None:
        """Not now: deliver it again, to anyone, after `delay_s`."""
        if self._line.up and not self._consumer.loses_ack():
            self._consumer.again(self.seq, delay_s)


class MemoryConsumer:
    """Messages in order, redelivered until acknowledged or `max_deliver` is reached."""

    def __init__(
        self,
        spec: ConsumerSpec,
        stream: MemoryStream,
        timers: Timers,
        *,
        give_up: Callable[[int], None],
        loses_ack: Callable[[], bool] = lambda: False,
    ) -> None:
        self.loses_ack = loses_ack
        self._spec = spec
        self._stream = stream
        self._timers = timers
        self._give_up = give_up
        self._members: deque[Member] = deque()
        self._last_seq = 0
        """Newest message delivered for the first time."""
        self._again: deque[int] = deque()
        self._deliveries: dict[int, int] = {}
        """How often each message that is not acknowledged was delivered."""
        self._waiting: dict[int, Timer] = {}
        self._look: Timer | None = None

    def join(self, member: Member) -> None:
        """Give `member` a share."""
        self._members.append(member)
        self.pump()

    def leave(self, member: Member) -> None:
        """Give `member` nothing more; what it holds is delivered again after the ack wait."""
        if member in self._members:
            self._members.remove(member)

    def returned(self, member: Member) -> None:
        """`member` was cut off, and asks anew."""
        member.unheard = 0
        self.pump()

    def ack(self, seq: int) -> None:
        """`seq` is done."""
        if timer := self._waiting.pop(seq, None):
            timer.cancel()
        self._deliveries.pop(seq, None)
        if seq in self._again:
            self._again.remove(seq)
        self.pump()

    def backlog(self) -> Backlog:
        """How far it has come."""
        unseen = self._stream.next_after(self._last_seq)
        waiting = [*self._deliveries, *([unseen.seq] if unseen else [])]
        newest_seq = self._stream.last_seq
        return Backlog(newest_seq, min(waiting, default=newest_seq + 1) - 1)

    def hold(self, seq: int) -> None:
        """Whoever has `seq` works on it."""
        if timer := self._waiting.pop(seq, None):
            timer.cancel()
            self._wait(seq)

    def again(self, seq: int, delay_s: float) -> None:
        """Deliver `seq` again after `delay_s`, unless it was acknowledged or tried too often."""
        if seq not in self._deliveries:
            return
        if timer := self._waiting.pop(seq, None):
            timer.cancel()
        self._waiting[seq] = self._timers.after(delay_s, lambda: self._requeue(seq))

    def pump(self) -> None:
        """Deliver what can be delivered now."""
        while (message := self._peek()) is not None:
            member = self._next_member()
            if member is None:
                self._look_soon()
                return
            self._deliver(message, member)

    def _requeue(self, seq: int) -> None:
        self._waiting.pop(seq, None)
        if self._deliveries.get(seq, 0) >= self._spec.max_deliver:
            self._deliveries.pop(seq, None)
            self._give_up(seq)
        elif seq in self._deliveries:
            self._again.append(seq)
        self.pump()

    def _peek(self) -> StoredMessage | None:
        while self._again:
            message = self._stream.get(self._again[0])
            if message is not None:
                return message
            self._deliveries.pop(self._again.popleft(), None)
        if len(self._deliveries) >= self._spec.max_ack_pending:
            return None
        return self._stream.next_after(self._last_seq)

    def _next_member(self) -> Member | None:
        for _ in range(len(self._members)):
            member = self._members[0]
            self._members.rotate(-1)
            if member.line.up and self._asks(member) and not member.paused():
                return member
        return None

    def _asks(self, member: Member) -> bool:
        if member.unheard == 0:
            return True
        frozen = self._timers.now_s() - member.heard_s >= ASKED_S
        return member.unheard < self._spec.batch and not frozen

    def _deliver(self, message: StoredMessage, member: Member) -> None:
        seq = message.seq
        if self._again and self._again[0] == seq:
            self._again.popleft()
        else:
            self._last_seq = seq
        self._deliveries[seq] = self._deliveries.get(seq, 0) + 1
        self._wait(seq)
        pulled = PulledMessage(self, message, member.line, deliveries=self._deliveries[seq])
        if member.unheard == 0:
            member.heard_s = self._timers.now_s()
        member.unheard += 1
        member.line.soon(self._hand, member, pulled)

    def _wait(self, seq: int) -> None:
        self._waiting[seq] = self._timers.after(self._spec.ack_wait_s, lambda: self._requeue(seq))

    def _hand(self, member: Member, pulled: PulledMessage) -> None:
        member.unheard = max(0, member.unheard - 1)
        member.heard_s = self._timers.now_s()
        if member.line.up and member in self._members:
            member.lifetime.call(member.handler, pulled, f"pull {self._spec.name}")
        if member.unheard == 0:
            self.pump()

    def _look_soon(self) -> None:
        if self._members and (self._look is None or self._look.action is None):
            self._look = self._timers.after(PAUSED_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self.pump()
