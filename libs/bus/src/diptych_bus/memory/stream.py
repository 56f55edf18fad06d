"""One stream: sequences, dedupe, limits. Pure; the time is an argument."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diptych_bus.port import Stored
from diptych_bus.sizes import message_bytes
from diptych_contracts.errors import StoreFull
from diptych_contracts.streams import Discard, StreamSpec

EPOCH_UNIX_MS = 1_700_000_000_000
"""The broker's clock at zero: far from anybody's wall clock, since none may be mixed with it."""


def unix_ms(now_s: float) -> int:
    """The broker's wall time at `now_s`."""
    return EPOCH_UNIX_MS + round(now_s * 1000)


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message at its place."""

    seq: int
    previous_seq: int
    """Of the same subject; 0 if it was the first."""
    subject: str
    data: bytes
    headers: Mapping[str, str]
    stored_s: float

    @property
    def size_bytes(self) -> int:
        """What it counts towards the stream's limit."""
        return message_bytes(self.data, self.headers) + len(self.subject)


class MemoryStream:
    """The messages of one stream."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.last_seq = 0
        self._messages: dict[int, StoredMessage] = {}
        self._by_subject: dict[str, list[int]] = {}
        self._ids: dict[str, tuple[int, float]] = {}
        self._bytes = 0

    def store(
        self, subject: str, data: bytes, headers: Mapping[str, str], now_s: float
    ) -> tuple[Stored, StoredMessage | None]:
        """Store a message; the second part is None if it was a duplicate.

        Raises:
            StoreFull: the stream keeps what it has.
        """
        self._forget(now_s)
        msg_id = headers.get("Nats-Msg-Id")
        if msg_id is not None and msg_id in self._ids:
            return Stored(self._ids[msg_id][0], duplicate=True), None
        seqs = self._by_subject.get(subject, [])
        previous = seqs[-1] if seqs else 0
        message = StoredMessage(self.last_seq + 1, previous, subject, data, headers, now_s)
        self._make_room(message.size_bytes)
        self.last_seq += 1
        self._messages[message.seq] = message
        self._by_subject.setdefault(subject, []).append(message.seq)
        self._bytes += message.size_bytes
        if msg_id is not None:
            self._ids[msg_id] = (message.seq, now_s)
        return Stored(message.seq), message

    @property
    def first_seq(self) -> int:
        """The oldest sequence that is there; one beyond the newest if none is."""
        return next(iter(self._messages), self.last_seq + 1)

    def get(self, seq: int) -> StoredMessage | None:
        """The message at `seq`."""
        return self._messages.get(seq)

    def next_after(self, seq: int) -> StoredMessage | None:
        """The first message after `seq`, on any subject."""
        for candidate in range(seq + 1, self.last_seq + 1):
            if candidate in self._messages:
                return self._messages[candidate]
        return None

    def after(self, seq: int) -> list[StoredMessage]:
        """All messages after `seq`, in order."""
        return [message for place, message in self._messages.items() if place > seq]

    def on(self, subject: str, *, after_seq: int) -> Iterator[StoredMessage]:
        """The messages on `subject` after `after_seq`, in order."""
        seqs = self._by_subject.get(subject, [])
        for seq in seqs[bisect_right(seqs, after_seq) :]:
            if seq in self._messages:
                yield self._messages[seq]

    def last_on(self, subject: str) -> int:
        """The newest sequence on `subject`; 0 if there is none."""
        seqs = self._by_subject.get(subject)
        return seqs[-1] if seqs else 0

    def erase(self, seq: int) -> None:
        """Delete the message at `seq`, if it is there."""
        message = self._messages.pop(seq, None)
        if message is None:
            return
        self._bytes -= message.size_bytes
        seqs = self._by_subject[message.subject]
        seqs.remove(seq)
        if not seqs:
            del self._by_subject[message.subject]

    def _make_room(self, size_bytes: int) -> None:
        if self._bytes + size_bytes > self.spec.max_bytes and self.spec.discard is Discard.NEW:
            raise StoreFull(f"{self.spec.name}: maximum bytes exceeded")
        while self._messages and self._bytes + size_bytes > self.spec.max_bytes:
            self.erase(next(iter(self._messages)))

    def _forget(self, now_s: float) -> None:
        oldest_id_s = now_s - self.spec.dedupe_s
        while self._ids and next(iter(self._ids.values()))[1] < oldest_id_s:
            del self._ids[next(iter(self._ids))]
        oldest_s = now_s - self.spec.max_age_s
        while self._messages and next(iter(self._messages.values())).stored_s < oldest_s:
            self.erase(next(iter(self._messages)))
