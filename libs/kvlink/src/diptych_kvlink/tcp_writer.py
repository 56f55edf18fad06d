"""The `tcp` link, writer's side: one connection to one reader, opened when first needed.

A block's buffer is private memory, so a frozen writer, or one whose transfer was given up, holds
nothing of the reader's. It lives as long as somebody looks at it: the engine, or a send under way.
"""

import socket
import threading
import time
from collections.abc import Sequence

from diptych_contracts.errors import Incompatible, LinkBroken, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink import tcp_wire as wire
from diptych_kvlink.tcp_address import TcpAddress
from diptych_kvlink.tcp_stream import TcpStream

_RETRY_S = 0.25
"""After a failure nothing is tried for this long, so that all who wait fail together."""
_MOST_IN_KERNEL_BYTES = 8_000_000
"""What the two socket buffers hold of a batch that was sent."""


class TcpWriter:
    """The writer's side of one endpoint. `close` from the link's thread, or after it."""

    def __init__(self, endpoint: LinkEndpoint, writer: Incarnation, *, stall_s: float) -> None:
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
        if self.is_ready:
            return
        self._drop()
        if self._closed:
            raise LinkBroken("the link is closed")
        if self._failed_s is not None and time.monotonic() < self._failed_s + _RETRY_S:
            raise LinkBroken(f"{self._address.where} failed a moment ago")
        stream = self._call()
        try:
            self._greet(stream)
        except wire.Garbled as err:
            self._failed_s = time.monotonic()
            stream.close()
            raise Incompatible(str(err)) from err
        except (LinkBroken, Incompatible):
            self._failed_s = time.monotonic()
            stream.close()
            raise
        self._failed_s = None
        with self._lock:
            self._stream = stream
            if self._closed:
                stream.hang_up()

    def buffer(self, ref: SlotRef) -> memoryview:
        """Fresh private memory for one block."""
        if self._closed:
            raise Refused(RefusalReason.UNKNOWN_TICKET, "the link is closed")
        if not 0 <= ref.slot < self._slots:
            raise Refused(RefusalReason.UNKNOWN_TICKET, f"the pool has no slot {ref.slot}")
        return memoryview(bytearray(self._slot_bytes))

    def send(self, blocks: Sequence[tuple[SlotRef, memoryview]]) -> None:
        """Send blocks as one batch; connects first if need be. Raises `LinkBroken`."""
        self.connect()
        stream = self._stream
        assert stream is not None
        self._batch = (self._batch + 1) & 0xFFFFFFFF
        self._refs = [ref for ref, _ in blocks]
        self._sent_bytes = sum(len(data) for _, data in blocks)
        head = wire.pack_batch(self._batch, [(ref, len(data)) for ref, data in blocks])
        try:
            stream.send_all([head, *(data for _, data in blocks)])
        except LinkBroken as err:
            raise self._broken(err) from err

    def confirm(self) -> None:
        """Wait for the answer to the last batch.

        Raises:
            LinkBroken: there is none in time, or none that makes sense.
            Refused: a slot was closed to this writer.
        """
        stream = self._stream
        if stream is None:
            raise LinkBroken("the link is closed")
        try:
            answers = self._ack(stream)
        except (LinkBroken, wire.Garbled) as err:
            raise self._broken(err) from err
        for ref, stored in zip(self._refs, answers, strict=True):
            if stored != wire.Stored.STORED:
                detail = f"slot {ref.slot} is closed for generation {ref.generation}"
                raise Refused(RefusalReason.UNKNOWN_TICKET, detail)

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
        address = (self._address.host, self._address.port)
        try:
            sock = socket.create_connection(address, timeout=self._stall_s)
        except (OSError, UnicodeError) as err:  # the latter for a host that cannot be one
            self._failed_s = time.monotonic()
            why = getattr(err, "strerror", None) or str(err)
            raise LinkBroken(f"cannot connect to {self._address.where}: {why}") from err
        return TcpStream(sock, stall_s=self._stall_s)

    def _greet(self, stream: TcpStream) -> None:
        address = self._address
        hello = wire.Hello(self._writer, address.reader, self._slot_bytes, address.key)
        stream.send_all([hello.pack()])
        answer = stream.receive(wire.WELCOME.size, stream.deadline_s(0))
        wire.check_welcome(answer, address.where)

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
