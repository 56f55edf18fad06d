"""The server's part: subscriptions, streams, consumers, buckets, objects; and being away."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from diptych_bus.advisories import Undelivered
from diptych_bus.memory.bucket import BucketStore
from diptych_bus.memory.consumer import MemoryConsumer
from diptych_bus.memory.faults import Faults
from diptych_bus.memory.line import Line
from diptych_bus.memory.stream import MemoryStream, StoredMessage
from diptych_bus.memory.timers import Timers, loop_s
from diptych_bus.port import Stored
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway
from diptych_contracts.streams import STREAMS, BucketSpec, ConsumerSpec, StreamSpec

if TYPE_CHECKING:
    from diptych_bus.memory.bus import MemoryBus

Reply = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class CoreMessage:
    """A message that is not stored; `reply` takes the answer of a request."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    reply: Reply | None = None


Receiver = Callable[[CoreMessage], None]


@lru_cache(maxsize=16_384)
def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription on `pattern` (`*`: one token, `>`: the rest) hears `subject`."""
    if pattern == subject:
        return True
    wanted, tokens = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > place
        if place >= len(tokens) or token not in ("*", tokens[place]):
            return False
    return len(wanted) == len(tokens)


class MemoryBroker:
    """A server in memory; services of one process meet on it.

    Args:
        now_s: The clock of TTLs, ack waits, dedupe windows and resends: the loop's. A test that
            owns it calls `run_due` after moving it.
        faults: What goes wrong, if anything.
        streams: The streams it has.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = loop_s,
        faults: Faults | None = None,
        streams: Iterable[StreamSpec] = STREAMS,
    ) -> None:
        self.timers = Timers(now_s)
        self.streams = {spec.name: MemoryStream(spec) for spec in streams}
        self.objects: dict[tuple[str, str], bytes] = {}
        self._faults = faults
        self._receivers: list[tuple[str, Receiver, Line]] = []
        self._consumers: dict[tuple[str, str], MemoryConsumer] = {}
        self._buckets: dict[str, BucketStore] = {}
        self._listeners: list[tuple[str, Callable[[StoredMessage], None], Line]] = []
        self._lines: list[Line] = []
        self._away = False

    def connect(self, name: str) -> "MemoryBus":
        """A bus of its own for one service; needs a running loop."""
        from diptych_bus.memory.bus import MemoryBus  # late: they know each other

        return MemoryBus(self, name)

    def run_due(self) -> None:
        """Run what the clock has made due."""
        self.timers.run_due()

    @property
    def away(self) -> bool:
        """Whether the server is away, as if killed; what it stored survives."""
        return self._away

    def go_away(self) -> None:
        """From now on nothing is taken and nobody is answered."""
        self._away = True
        for line in self._lines:
            line.server(up=False)

    def come_back(self) -> None:
        """Serve again; clients send again what was not acknowledged."""
        self._away = False
        for line in self._lines:
            line.server(up=True)

    def line(self) -> Line:
        """A new client's way here."""
        self._lines = [line for line in self._lines if not line.dead]
        self._lines.append(Line(self.timers.now_s, server_up=not self._away))
        return self._lines[-1]

    # Core messages.

    def receive(self, pattern: str, receiver: Receiver, line: Line) -> Callable[[], None]:
        """Call `receiver` for messages on `pattern`; gives the way to stop it."""
        entry = (pattern, receiver, line)
        self._receivers.append(entry)
        return partial(self._receivers.remove, entry)

    def send(self, message: CoreMessage) -> bool:
        """Deliver a core message to all who listen; False if nobody does."""
        if self.away:
            return True
        receivers = [r for r in self._receivers if matches(r[0], message.subject)]
        for _, receiver, line in receivers:
            for delay_s in self.copies(message.subject):
                self.later(delay_s, line, partial(receiver, message))
        return bool(receivers)

    def copies(self, subject: str) -> tuple[float, ...]:
        """The delays of the copies of a message that arrive."""
        return self._faults.copies(subject) if self._faults else (0.0,)

    def lag_s(self, subject: str) -> float:
        """How late a reader hears of a stored message."""
        return self._faults.lag_s(subject) if self._faults else 0.0

    def loses_ack(self, subject: str) -> bool:
        """Whether an answer or acknowledgement is lost."""
        return self._faults is not None and self._faults.loses_ack(subject)

    def later(self, delay_s: float, line: Line, action: Callable[[], None]) -> None:
        """Run `action` for the client of `line` in the loop's next round, or after `delay_s`."""
        if delay_s > 0:
            self.timers.after(delay_s, partial(line.soon, action))
        else:
            line.soon(action)

    # Streams.

    def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> tuple[Stored, bool]:
        """Store a message; the second part says whether its PubAck is lost."""
        stream = self._stream_of(subject)
        done, message = stream.store(subject, data, headers, self.timers.now_s())
        if message is not None:
            self._stored(stream, message)
        return done, self.loses_ack(subject)

    def listen(
        self, subject: str, listener: Callable[[StoredMessage], None], line: Line
    ) -> Callable[[], None]:
        """Call `listener` for each message stored on `subject`; gives the way to stop it."""
        entry = (subject, listener, line)
        self._listeners.append(entry)
        return partial(self._listeners.remove, entry)

    def consumer(self, spec: ConsumerSpec) -> MemoryConsumer:
        """The durable consumer `spec`, made on first use."""
        key = (spec.stream, spec.name)
        if key not in self._consumers:
            stream = self.streams[spec.stream]
            self._consumers[key] = MemoryConsumer(
                spec,
                stream,
                self.timers,
                give_up=partial(self._give_up, spec),
                loses_ack=partial(self.loses_ack, f"$JS.ACK.{spec.stream}"),
            )
        return self._consumers[key]

    def _give_up(self, spec: ConsumerSpec, seq: int) -> None:
        """Say that a message is delivered no more."""
        said = Undelivered(spec.stream, spec.name, seq, deliveries=spec.max_deliver)
        subject = subjects.undelivered(spec.stream, spec.name)
        if any(matches(p, subject) for s in self.streams.values() for p in s.spec.subjects):
            self.store(subject, said.encoded(), {})
        else:
            self.send(CoreMessage(subject, said.encoded(), {}))

    def bucket(self, spec: BucketSpec) -> BucketStore:
        """The bucket `spec`, made on first use."""
        if spec.name not in self._buckets:
            self._buckets[spec.name] = BucketStore(spec, self)
        return self._buckets[spec.name]

    def _stream_of(self, subject: str) -> MemoryStream:
        for stream in self.streams.values():
            if any(matches(pattern, subject) for pattern in stream.spec.subjects):
                return stream
        raise BusAway(f"no stream takes {subject}")

    def _stored(self, stream: MemoryStream, message: StoredMessage) -> None:
        for subject, listener, line in self._listeners:
            if subject == message.subject:
                live = f"live.{subject.partition('.')[2]}"
                self.later(self.lag_s(live), line, partial(listener, message))
        for (name, _), consumer in self._consumers.items():
            if name == stream.spec.name:
                asyncio.get_running_loop().call_soon(consumer.pump)
        self.send(CoreMessage(message.subject, message.data, message.headers))
        if stream.spec.republish is not None:
            self.send(_republished(stream.spec.republish, message))


def _republished(rule: tuple[str, str], message: StoredMessage) -> CoreMessage:
    """`message` as it is republished; the destination's only placeholder is `{{wildcard(1)}}`."""
    _, destination = rule
    token = message.subject.split(".", 1)[1]
    headers = {
        **message.headers,
        "Nats-Subject": message.subject,
        "Nats-Sequence": str(message.seq),
        "Nats-Last-Sequence": str(message.previous_seq),
    }
    return CoreMessage(destination.replace("{{wildcard(1)}}", token), message.data, headers)
