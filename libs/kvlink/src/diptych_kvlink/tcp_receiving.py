"""The reader's side of one `tcp` connection: greet, then store batches until it ends.

A peer that is garbled, slow or silent in mid-batch loses its connection and nothing else: it has a
thread of its own, sizes are checked before anything is received, and a block whose ticket does not
count, or whose slot is not open to it, goes to a scratch buffer.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from diptych_contracts.ids import Incarnation
from diptych_contracts.tickets import TicketFault
from diptych_contracts.transfers import SlotRef
from diptych_kvlink import tcp_wire as wire
from diptych_kvlink.sealing import BadTicket, TicketOffice
from diptych_kvlink.slot_gates import Holder, SlotGates
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.tcp_wire import Stored, Verdict

_SCRATCH_BYTES = 1 << 18
_ANSWERS = {fault: stored for stored, fault in wire.FAULTS.items()}


class TurnedDown(Exception):
    """A writer was answered with a verdict and cut off."""

    def __init__(self, writer: Incarnation, verdict: Verdict) -> None:
        super().__init__(f"turned {writer} away: {verdict.name.lower()}")
        self.verdict = verdict


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


@dataclass(frozen=True, slots=True)
class Guard:
    """Who checks tickets, and who counts what was wrong."""

    office: TicketOffice
    tally: Tally


class Receiving:
    """One connection, on its own thread.

    Args:
        stream: The connection.
        gates: Where blocks go.
        identity: Who the reader is.
        guard: Who looks at tickets.
        greeted: Called once with the writer; what it gives is the last word on letting it in.
    """

    def __init__(
        self,
        stream: TcpStream,
        gates: SlotGates,
        identity: Identity,
        guard: Guard,
        *,
        greeted: Callable[[Incarnation], Verdict],
    ) -> None:
        self._stream = stream
        self._gates = gates
        self._identity = identity
        self._guard = guard
        self._greeted = greeted
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def run(self, until_s: float) -> None:
        """Greet until `until_s`, then serve until the writer leaves between two batches.

        Raises:
            LinkBroken: it has gone in the middle of something, or is hung.
            Garbled: it does not speak the protocol.
            TurnedDown: it is not let in.
        """
        writer = self._greet(until_s)
        self._stream.wait_idle()
        while not self._stream.has_ended():
            self._store_batch(writer)
            self._stream.wait_idle()

    def _greet(self, until_s: float) -> Incarnation:
        head = self._stream.receive(wire.HELLO.size, until_s)
        names = self._stream.receive(wire.hello_names_bytes(head), until_s)
        hello = wire.unpack_hello(head, names)
        verdict = self._identity.judge(hello)
        if verdict is Verdict.WELCOME:
            verdict = self._greeted(hello.writer)
        self._stream.send_all([wire.pack_welcome(verdict)])
        if verdict is not Verdict.WELCOME:
            raise TurnedDown(hello.writer, verdict)
        return hello.writer

    def _store_batch(self, writer: Incarnation) -> None:
        until_s = self._stream.deadline_s(0)
        head = self._stream.receive(wire.BATCH.size, until_s)
        number, count, seal_bytes = wire.unpack_batch(head)
        holder = self._holder(self._stream.receive(seal_bytes, until_s), writer)
        entries = wire.unpack_entries(
            self._stream.receive(count * wire.ENTRY.size, until_s),
            slots=len(self._gates),
            slot_bytes=self._identity.slot_bytes,
        )
        until_s = self._stream.deadline_s(sum(n_bytes for _, n_bytes in entries))
        stored = [self._store(ref, n_bytes, holder, until_s) for ref, n_bytes in entries]
        for answer in {*stored} - {Stored.STORED}:
            self._guard.tally.add(wire.FAULTS[answer])
        self._stream.send_all([wire.pack_ack(number, stored)])

    def _holder(self, seal: bytes, writer: Incarnation) -> Holder | Stored:
        """For whom a batch is, by the ticket it is written under; or why that does not count."""
        try:
            return Holder(writer, self._guard.office.check_write(seal, writer))
        except BadTicket as err:
            return _ANSWERS.get(TicketFault(err.fault), Stored.ALTERED_TICKET)

    def _store(self, ref: SlotRef, n_bytes: int, holder: Holder | Stored, until_s: float) -> Stored:
        at, refused = 0, holder if isinstance(holder, Stored) else Stored.STORED
        while at < n_bytes:
            received = None
            if isinstance(holder, Holder) and refused is Stored.STORED:
                part = slice(at, n_bytes)
                received = self._gates.copy(ref, holder, part, self._stream.receive_some)
                if received is None:
                    refused = self._gates.why_closed(ref, holder)
            if received is None:
                received = self._stream.receive_some(self._scratch[: n_bytes - at])
            if not received:
                self._stream.wait_for_bytes(until_s)
            at += received
        return refused
