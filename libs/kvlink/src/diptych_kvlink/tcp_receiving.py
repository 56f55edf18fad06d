"""The reader's side of one `tcp` connection: greet, then store batches until it ends.

A peer that is garbled, slow or silent in mid-batch loses its connection and nothing else: it has a
thread of its own, sizes are checked before anything is received, and a block whose slot is not open
to it goes to a scratch buffer.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import SlotRef
from diptych_kvlink import tcp_wire as wire
from diptych_kvlink.slot_gates import SlotGates
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.tcp_wire import Stored, Verdict

_SCRATCH_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Identity:
    """What a writer must know to be let in."""

    reader: str
    slot_bytes: int
    key: bytes

    def judge(self, hello: wire.Hello) -> Verdict:
        """Whether a hello is meant for this reader, and by whom it was told."""
        if hello.version != wire.VERSION:
            return Verdict.OTHER_VERSION
        if hello.reader != self.reader:
            return Verdict.OTHER_READER
        if not hmac.compare_digest(hello.key, self.key):
            return Verdict.WRONG_KEY
        if hello.slot_bytes != self.slot_bytes:
            return Verdict.OTHER_SLOT_SIZE
        return Verdict.WELCOME


class Receiving:
    """One connection, on its own thread.

    Args:
        stream: The connection.
        gates: Where blocks go.
        identity: Who the reader is.
        greeted: Called once with the writer; what it gives is the last word on letting it in.
    """

    def __init__(
        self,
        stream: TcpStream,
        gates: SlotGates,
        identity: Identity,
        *,
        greeted: Callable[[Incarnation], Verdict],
    ) -> None:
        self._stream = stream
        self._gates = gates
        self._identity = identity
        self._greeted = greeted
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def run(self) -> None:
        """Serve until the writer leaves between two batches.

        Raises:
            LinkBroken: it has gone in the middle of something, or is hung.
            Garbled: it does not speak the protocol, or was turned away.
        """
        writer = self._greet()
        self._stream.wait_idle()
        while not self._stream.has_ended():
            self._store_batch(writer)
            self._stream.wait_idle()

    def _greet(self) -> Incarnation:
        until_s = self._stream.deadline_s(0)
        head = self._stream.receive(wire.HELLO.size, until_s)
        names = self._stream.receive(wire.hello_names_bytes(head), until_s)
        hello = wire.unpack_hello(head, names)
        verdict = self._identity.judge(hello)
        if verdict is Verdict.WELCOME:
            verdict = self._greeted(hello.writer)
        self._stream.send_all([wire.pack_welcome(verdict)])
        if verdict is not Verdict.WELCOME:
            raise wire.Garbled(f"turned {hello.writer} away: {verdict.name.lower()}")
        return hello.writer

    def _store_batch(self, writer: Incarnation) -> None:
        until_s = self._stream.deadline_s(0)
        number, count = wire.unpack_batch(self._stream.receive(wire.BATCH.size, until_s))
        entries = wire.unpack_entries(
            self._stream.receive(count * wire.ENTRY.size, until_s),
            slots=len(self._gates),
            slot_bytes=self._identity.slot_bytes,
        )
        until_s = self._stream.deadline_s(sum(n_bytes for _, n_bytes in entries))
        stored = [self._store(ref, n_bytes, writer, until_s) for ref, n_bytes in entries]
        self._stream.send_all([wire.pack_ack(number, stored)])

    def _store(self, ref: SlotRef, n_bytes: int, writer: Incarnation, until_s: float) -> Stored:
        at, allowed = 0, True
        while at < n_bytes:
            received = None
            if allowed:
                part = slice(at, n_bytes)
                received = self._gates.copy(ref, writer, part, self._stream.receive_some)
                allowed = received is not None
            if received is None:
                received = self._stream.receive_some(self._scratch[: n_bytes - at])
            if not received:
                self._stream.wait_for_bytes(until_s)
            at += received
        return Stored.STORED if allowed else Stored.CLOSED
