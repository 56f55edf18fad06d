"""The reader's side of one `tcp` connection: greet, then store batches until it ends.

A peer that is garbled, slow or silent in mid-batch loses its connection and nothing else: it has a
thread of its own, sizes are checked before anything is received, and a block whose ticket does not
count, or whose slot is not open to it, goes to a scratch buffer.
"""

import hmac
from collections.abc import Callable, Sequence
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
"""No less than a sealed piece."""
_AT_ONCE_BYTES = 1 << 19
"""Offered to the stream in one call; a slot's gate is held for that copy."""
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
        self._stream.take_key(until_s)
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
        stored = self._store(entries, holder)
        for answer in {*stored} - {Stored.STORED}:
            self._guard.tally.add(wire.FAULTS[answer])
        self._stream.send_all([wire.pack_ack(number, stored)])

    def _holder(self, seal: bytes, writer: Incarnation) -> Holder | Stored:
        """For whom a batch is, by the ticket it is written under; or why that does not count."""
        try:
            return Holder(writer, self._guard.office.check_write(seal, writer))
        except BadTicket as err:
            return _ANSWERS.get(TicketFault(err.fault), Stored.ALTERED_TICKET)

    def _store(
        self, entries: Sequence[tuple[SlotRef, int]], holder: Holder | Stored
    ) -> list[Stored]:
        """Take in all the bytes of a batch; gives what became of each block."""
        stream, gates = self._stream, self._gates
        owed = sum(n_bytes for _, n_bytes in entries)
        until_s = stream.deadline_s(owed)
        stream.expect_blocks([n_bytes for _, n_bytes in entries])
        stored = [holder if isinstance(holder, Stored) else Stored.STORED] * len(entries)
        block = at = 0
        while owed:
            ref, n_bytes = entries[block]
            received = None
            asked = n_bytes - at
            if isinstance(holder, Holder) and stored[block] is Stored.STORED:
                parts, asked = self._parts(entries, block, at)
                received = gates.copy(parts, holder, stream.receive_across)
                if received is None:
                    stored[block] = gates.why_closed(ref, holder)
            if received is None:
                scratch = self._scratch[: n_bytes - at]
                received, asked = stream.receive_across((scratch,)), len(scratch)
            owed -= received
            at += received
            while owed and at >= entries[block][1]:
                at -= entries[block][1]
                block += 1
            if owed and received < asked:
                stream.wait_for_bytes(until_s, owed)
        return stored

    def _parts(
        self, entries: Sequence[tuple[SlotRef, int]], block: int, at: int
    ) -> tuple[list[tuple[SlotRef, slice]], int]:
        """What of the slots is to be filled next, and how many bytes that is."""
        parts, n_bytes = [], 0
        for ref, size in entries[block : block + self._stream.slots_at_once]:
            parts.append((ref, slice(at, size)))
            n_bytes += size - at
            at = 0
            if n_bytes >= _AT_ONCE_BYTES:
                break
        return parts, n_bytes
