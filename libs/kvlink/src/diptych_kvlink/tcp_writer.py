"""The `tcp` link, writer's side: one connection to one reader, opened when first needed.

Through TLS it shows its process's certificate, and talks to nobody but who shows the endpoint's.

A block's buffer is private memory, so a frozen writer, or one whose transfer was given up, holds
nothing of the reader's. It lives as long as somebody looks at it: the engine, or a send under way.
"""

import socket
import ssl
import threading
import time
from collections.abc import Sequence

from diptych_contracts.errors import Incompatible, LinkBroken, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.tickets import TicketFault
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink import tcp_wire as wire
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.sealing import BadTicket
from diptych_kvlink.tcp_address import TcpAddress
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.tls_stream import TlsStream

_RETRY_S = 0.25
"""After a failure nothing is tried for this long, so that all who wait fail together."""
_MOST_IN_KERNEL_BYTES = 8_000_000
"""What the two socket buffers hold of a batch that was sent."""
_RENEW_BYTES = 256_000_000_000
"""One key of AES-GCM is good for 2^34.5 of its blocks (as RFC 8446, 5.5): then a new connection."""


class TcpWriter:
    """The writer's side of one endpoint. `close` from the link's thread, or after it.

    Args:
        endpoint: The reader's; with a certificate, TLS is spoken.
        writer: This process.
        stall_s: As of `TcpStream`.
        identity: What this process shows there, as announced in its `Reserve`.
    """

    def __init__(
        self,
        endpoint: LinkEndpoint,
        writer: Incarnation,
        *,
        stall_s: float,
        identity: LinkIdentity | None = None,
    ) -> None:
        self._identity = identity
        self._certificate = endpoint.certificate
        self._crossed_bytes = 0
        self._address = TcpAddress.parse(endpoint.address)
        self._slots = endpoint.slots
        self._slot_bytes = endpoint.slot_bytes
        self._writer = writer
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._stream: TcpStream | None = None
        self._closed = False
        self._failed_s: float | None = None
        self._batch = 0
        self._refs: list[SlotRef] = []
        self._sent_bytes = 0

    @property
    def is_ready(self) -> bool:
        """Whether it is connected."""
        stream = self._stream
        return stream is not None and not stream.has_ended()

    def connect(self) -> None:
        """Connect and greet, unless that is done.

        Raises:
            LinkBroken: nobody answers, or it failed a moment ago.
            Incompatible: who answers is not the reader of this endpoint.
        """
        if self.is_ready and self._crossed_bytes < _RENEW_BYTES:
            return
        if self._closed:
            self._drop()
            raise LinkBroken("the link is closed")
        if self._failed_s is not None and time.monotonic() < self._failed_s + _RETRY_S:
            self._drop()
            raise LinkBroken(f"{self._address.where} failed a moment ago")
        try:
            stream = self._call()
        except (LinkBroken, Incompatible):
            self._failed_s = time.monotonic()
            self._drop()
            raise
        self._failed_s, self._crossed_bytes = None, 0
        with self._lock:
            older, self._stream = self._stream, stream
            if self._closed:
                stream.hang_up()
        if older is not None:  # Only now: one that ends unreplaced ends this writer's tickets.
            older.close()

    def buffer(self, ref: SlotRef) -> memoryview:
        """Fresh private memory for one block."""
        if self._closed:
            raise Refused(RefusalReason.UNKNOWN_TICKET, "the link is closed")
        if not 0 <= ref.slot < self._slots:
            raise Refused(RefusalReason.UNKNOWN_TICKET, f"the pool has no slot {ref.slot}")
        return memoryview(bytearray(self._slot_bytes))

    def send(self, blocks: Sequence[tuple[SlotRef, memoryview]], seal: bytes = b"") -> None:
        """Send blocks as one batch, under the ticket of `seal`; connects first if need be.

        Raises:
            LinkBroken, Incompatible: as `connect`; or the connection failed.
        """
        self.connect()
        stream = self._stream
        assert stream is not None
        self._batch = (self._batch + 1) & 0xFFFFFFFF
        self._refs = [ref for ref, _ in blocks]
        self._sent_bytes = sum(len(data) for _, data in blocks)
        self._crossed_bytes += self._sent_bytes
        head = wire.pack_batch(self._batch, [(ref, len(data)) for ref, data in blocks], seal)
        try:
            stream.send_all([head, *(data for _, data in blocks)])
        except LinkBroken as err:
            raise self._broken(err) from err

    def confirm(self) -> None:
        """Wait for the answer to the last batch.

        Raises:
            LinkBroken: there is none in time, or none that makes sense.
            Refused: a slot was closed to this writer, or its ticket does not count.
        """
        stream = self._stream
        if stream is None:
            raise LinkBroken("the link is closed")
        try:
            answers = self._ack(stream)
        except (LinkBroken, Incompatible, wire.Garbled) as err:
            raise self._broken(err) from err
        if not any(answers):  # Each is `STORED`, which is 0.
            return
        for ref, stored in zip(self._refs, answers, strict=True):
            if stored != wire.Stored.STORED:
                raise _refused(ref, stored)

    def is_sending(self, ref: SlotRef) -> bool:
        """What is on its way is a copy, and stops at the slot's gate."""
        return False

    def stop(self, ref: SlotRef) -> None:
        """Nothing to say: the buffer was never the reader's."""

    def reader_is_gone(self) -> bool:
        """Whether the connection ended, or the last try to get one failed."""
        stream = self._stream
        return self._failed_s is not None if stream is None else stream.has_ended()

    def close(self) -> None:
        """Hang up. Idempotent."""
        with self._lock:
            self._closed = True
        self._drop()

    def _call(self) -> TcpStream:
        """A connection to the reader that has let this writer in."""
        where, context = self._address.where, self._context()
        try:
            sock = socket.create_connection(
                (self._address.host, self._address.port), timeout=self._stall_s
            )
            if context is None:
                stream = TcpStream(sock, stall_s=self._stall_s)
            else:
                stream = TlsStream(sock, context, calls=True, stall_s=self._stall_s)
        except (OSError, UnicodeError) as err:  # the latter for a host that cannot be one
            why = getattr(err, "strerror", None) or str(err)
            raise LinkBroken(f"cannot connect to {where}: {why}") from err
        try:
            self._greet(stream)
        except wire.Garbled as err:
            stream.close()
            raise Incompatible(str(err)) from err
        except Incompatible as err:
            stream.close()
            raise Incompatible(f"{self._address.reader} at {where}: {err}") from err
        except LinkBroken:
            stream.close()
            raise
        return stream

    def _context(self) -> ssl.SSLContext | None:
        """What TLS needs; None without."""
        if not self._certificate:
            return None
        if self._identity is None:
            self._identity = LinkIdentity()
        return self._identity.calling(self._certificate)

    def _greet(self, stream: TcpStream) -> None:
        address = self._address
        until_s = stream.deadline_s(0)
        if isinstance(stream, TlsStream) and stream.shake_hands(until_s) != self._certificate:
            raise Incompatible("shows another certificate than its endpoint names")
        hello = wire.Hello(self._writer, address.reader, self._slot_bytes, address.key)
        stream.send_all([hello.pack()])
        answer = stream.receive(wire.WELCOME.size, until_s)
        wire.check_welcome(answer, address.where)
        stream.give_key()

    def _ack(self, stream: TcpStream) -> bytes:
        until_s = stream.deadline_s(min(self._sent_bytes, _MOST_IN_KERNEL_BYTES))
        while True:
            number, count = wire.unpack_ack(stream.receive(wire.ACK.size, until_s))
            answers = stream.receive(count, until_s)
            if number == self._batch:
                break  # An earlier one may come first: its sender gave up before it asked.
        if count != len(self._refs):
            raise wire.Garbled(f"expected {len(self._refs)} answers, got {count}")
        return answers

    def _broken(self, err: Exception) -> LinkBroken:
        self._failed_s = time.monotonic()
        self._drop()
        return LinkBroken(f"{self._address.reader} at {self._address.where}: {err}")

    def _drop(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _refused(ref: SlotRef, answer: int) -> Refused:
    known = answer in tuple(wire.Stored)
    fault = wire.FAULTS[wire.Stored(answer)] if known else TicketFault.ALTERED
    return BadTicket(fault, f"slot {ref.slot} is closed for generation {ref.generation}")
