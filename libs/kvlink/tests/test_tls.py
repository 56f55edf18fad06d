"""The tcp link through TLS: who gets in, who is talked to, what one between the two can do."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import Incompatible, LinkBroken, Refused
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_contracts.wire import encode
from diptych_kvlink import tcp_wire as wire
from diptych_kvlink import tcp_writer
from diptych_kvlink.link_identity import LinkIdentity, check_certificate
from diptych_kvlink.links import LinkSettings, open_link
from diptych_kvlink.pool_file import PoolShape, private_slots
from diptych_kvlink.sealing import TicketOffice
from diptych_kvlink.tallying import Tally, TurnedAway
from diptych_kvlink.tcp_address import TcpAddress
from diptych_kvlink.tcp_listening import Listening
from diptych_kvlink.tcp_receiving import Guard
from diptych_kvlink.tcp_target import TcpTarget
from diptych_kvlink.tcp_writer import TcpWriter
from diptych_testkit.builders import a_generation

READER, WRITER = "decode-worker-1", Incarnation("prefill-worker-1")
SHAPE = PoolShape(slots=4, slot_bytes=50_000)
REF, TRANSFER = SlotRef(slot=1, generation=7), transfer_id(RequestId("r1"), 1)
SECRET = b"what a user wrote; " * 2000
WAIT_S = 60.0


class Desk:
    """A reader that expects one writer, who has a ticket."""

    def __init__(self, stall_s: float, tls: bool = True) -> None:
        self.stall_s = stall_s
        self.office, self.tally = TicketOffice(lambda: 0.0), Tally()
        self.target = TcpTarget(
            READER,
            private_slots(SHAPE),
            slot_bytes=SHAPE.slot_bytes,
            listening=Listening("127.0.0.1", 0, stall_s, "host-1", tls),
            guard=Guard(self.office, self.tally),
        )
        self.identity = LinkIdentity()
        self.target.expect(WRITER, self.identity.certificate)
        self.target.admit(1, 7, WRITER, TRANSFER)
        seal = self.office.seal(a_generation("r1"), WRITER, slots=b"", deadline_s=10.0)
        self.seal = encode(seal)
        self._writers: list[TcpWriter] = []

    def writer(
        self, writer: str = WRITER, identity: LinkIdentity | None = None, **changes: Any
    ) -> TcpWriter:
        endpoint = msgspec.structs.replace(self.target.endpoint, **changes)
        made = TcpWriter(
            endpoint,
            Incarnation(writer),
            stall_s=self.stall_s,
            identity=identity or self.identity,
        )
        self._writers.append(made)
        return made

    def put(self, writer: TcpWriter, data: bytes = SECRET) -> None:
        writer.send([(REF, memoryview(data))], self.seal)
        writer.confirm()

    @property
    def stored(self) -> bytes:
        return bytes(self.target.view(1, SHAPE.slot_bytes)).rstrip(b"\0")

    def counted(self, reason: str) -> None:
        """Wait until the reader has counted one of `reason`, and nothing else."""
        seen: dict[str, int] = {}
        until(lambda: seen.update(self.tally.take()) or seen)
        assert seen == {reason: 1}

    def call(self) -> socket.socket:
        where = TcpAddress.parse(self.target.endpoint.address)
        return socket.create_connection((where.host, where.port), timeout=WAIT_S)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self.target.close()


@pytest.fixture
def stall_s() -> float:
    return WAIT_S


@pytest.fixture
def tls() -> bool:
    return True


@pytest.fixture
def desk(stall_s: float, tls: bool) -> Iterator[Desk]:
    desk = Desk(stall_s, tls)
    yield desk
    desk.close()


def until(holds: Callable[[], Any]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def is_cut(sock: socket.socket) -> bool:
    """Whether the other end closes; waits for it."""
    try:
        while sock.recv(4096):
            pass
    except (ConnectionResetError, ssl.SSLError):
        pass
    return True


def test_the_announced_writer_is_let_in_and_its_bytes_arrive(desk: Desk) -> None:
    writer = desk.writer()
    desk.put(writer)
    assert desk.stored == SECRET
    stream = writer._stream
    assert stream is not None
    assert stream._tls.version() == "TLSv1.3"  # type: ignore[attr-defined]
    assert desk.tally.take() == {}


# Who knocks


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, "a plain hello"])
def test_who_speaks_no_tls_is_cut_off_and_counted(desk: Desk, said: Any) -> None:
    with desk.call() as sock:
        if isinstance(said, str):
            key = TcpAddress.parse(desk.target.endpoint.address).key
            said = wire.Hello(WRITER, READER, SHAPE.slot_bytes, key).pack()
            said += wire.pack_batch(1, [(REF, 5)], desk.seal) + b"plain"
        sock.sendall(said)
        assert is_cut(sock)
    desk.counted(TurnedAway.NOT_TLS)
    assert desk.stored == b""


def test_older_tls_is_not_spoken(desk: Desk) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with desk.call() as sock, pytest.raises((ssl.SSLError, ConnectionResetError)):
        context.wrap_socket(sock)
    desk.counted(TurnedAway.NOT_TLS)


def test_who_shows_no_certificate_is_turned_away(desk: Desk) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with desk.call() as sock, context.wrap_socket(sock) as call:
        assert is_cut(call)
    desk.counted(TurnedAway.NO_CERTIFICATE)


def test_a_certificate_that_nobody_announced_is_turned_away(desk: Desk) -> None:
    """Whoever has read the endpoint, and even the ticket, is not yet the writer."""
    writer = desk.writer(identity=LinkIdentity())
    with pytest.raises((Incompatible, LinkBroken)):
        desk.put(writer)
    desk.counted(TurnedAway.OTHER_CERTIFICATE)
    assert desk.stored == b""


def test_another_announced_writer_cannot_pose_as_the_tickets_holder(desk: Desk) -> None:
    other = LinkIdentity()
    desk.target.expect(Incarnation("prefill-worker-2"), other.certificate)
    with pytest.raises(Incompatible, match="turned this writer away: other certificate"):
        desk.put(desk.writer(WRITER, identity=other))
    desk.counted(TurnedAway.OTHER_CERTIFICATE)
    with pytest.raises(Refused, match="ticket_writer"):
        desk.put(desk.writer("prefill-worker-2", identity=other))
    assert desk.stored == b""
    desk.put(desk.writer())
    assert desk.stored == SECRET


@pytest.mark.parametrize("stall_s", [0.4])
@pytest.mark.parametrize("pace_s", [None, 0.05])
def test_a_handshake_that_never_ends_is_ended(desk: Desk, pace_s: float | None) -> None:
    """Slow loris: silent, or a byte now and then of a record that never comes to its end."""
    with desk.call() as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(b"\x16\x03\x01\x20\x00\x01\x00\x1f\xfc\x03\x03")
        began_s = time.monotonic()
        while pace_s is not None and time.monotonic() - began_s < WAIT_S:
            sock.sendall(b"a")
            time.sleep(pace_s)
        assert is_cut(sock)
    desk.counted(TurnedAway.SILENT)


def test_a_writer_has_one_certificate_for_its_life(desk: Desk) -> None:
    with pytest.raises(Refused, match="announced with another certificate"):
        desk.target.expect(WRITER, LinkIdentity().certificate)
    with pytest.raises(Refused, match="announced no certificate"):
        desk.target.expect(Incarnation("prefill-worker-3"), b"")
    desk.target.expect(WRITER, desk.identity.certificate)
    desk.put(desk.writer())


@pytest.mark.parametrize("what", ["nothing", "noise", "two", "a long one"])
def test_only_one_whole_certificate_is_one(what: str) -> None:
    one = LinkIdentity().certificate
    made = {
        "nothing": b"",
        "noise": b"\x30\x03abc",
        "two": one + LinkIdentity().certificate,
        "a long one": one + bytes(4000),
    }[what]
    with pytest.raises(Incompatible, match="certificate"):
        check_certificate(made)
    check_certificate(one)


# Who answers


@contextlib.contextmanager
def answering(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A listener in the reader's place; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener.accept()[0] as sock, contextlib.suppress(OSError):
            behave(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield str(TcpAddress("127.0.0.1", listener.getsockname()[1], READER, bytes(16)))
    finally:
        thread.join(WAIT_S)
        listener.close()


def test_a_reader_with_another_certificate_hears_nothing(desk: Desk) -> None:
    heard: list[bytes] = []

    def pose(sock: socket.socket) -> None:
        context = LinkIdentity().answering([desk.identity.certificate])
        with context.wrap_socket(sock, server_side=True) as posing:
            while data := posing.recv(4096):
                heard.append(data)

    with answering(pose) as address, pytest.raises(Incompatible, match="certificate"):
        desk.put(desk.writer(address=address))
    assert heard == []


def test_a_reader_without_tls_gets_no_hello(desk: Desk) -> None:
    heard: list[bytes] = []

    def pose(sock: socket.socket) -> None:
        heard.append(sock.recv(4096))
        sock.sendall(wire.pack_welcome(wire.Verdict.WELCOME))
        while data := sock.recv(4096):
            heard.append(data)

    with answering(pose) as address, pytest.raises(Incompatible, match="no TLS with this peer"):
        desk.put(desk.writer(address=address))
    assert READER.encode() not in b"".join(heard)
    assert SECRET[:100] not in b"".join(heard)


# Who stands between


@contextlib.contextmanager
def between(desk: Desk, bend: Callable[[int, bytes], bytes]) -> Iterator[str]:
    """A relay to the reader; `bend` makes what it passes on of what the writer has sent."""

    def pass_on(source: socket.socket, sink: socket.socket, bends: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(bend(passed, data) if bends else data)
                passed += len(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def relay(near: socket.socket) -> None:
        with desk.call() as far:
            back = threading.Thread(target=pass_on, args=(far, near, False))
            back.start()
            pass_on(near, far, True)
            back.join(WAIT_S)

    where = TcpAddress.parse(desk.target.endpoint.address)
    with answering(relay) as address:
        port = TcpAddress.parse(address).port
        yield str(TcpAddress("127.0.0.1", port, READER, where.key))


@pytest.mark.parametrize("tls", [True, False])
def test_who_listens_on_the_way_reads_nothing_and_only_without_tls_everything(
    desk: Desk, tls: bool
) -> None:
    crossed: list[bytes] = []

    def keep(_: int, data: bytes) -> bytes:
        crossed.append(data)
        return data

    with between(desk, keep) as address:
        writer = desk.writer(address=address)
        desk.put(writer)
        writer.close()
    whole = b"".join(crossed)
    assert desk.stored == SECRET
    assert len(whole) > len(SECRET)
    for known in (SECRET[:64], READER.encode(), b"r1.1"):
        assert (known in whole) is not tls


def test_a_bit_flipped_on_the_way_ends_the_connection_and_is_not_stored(desk: Desk) -> None:
    def flip(passed: int, data: bytes) -> bytes:
        at = 20_000 - passed  # well within the block
        if not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    with between(desk, flip) as address:
        writer = desk.writer(address=address)
        with pytest.raises(LinkBroken):
            desk.put(writer)
        writer.close()
    until(lambda: desk.target.is_dead(WRITER))
    assert SECRET.startswith(desk.stored)
    assert len(desk.stored) < 20_000


def test_what_lies_between_a_message_and_its_blocks_ends_the_connection(desk: Desk) -> None:
    """Blocks are no TLS: what TLS holds when they begin would be taken for the next message."""
    address = TcpAddress.parse(desk.target.endpoint.address)
    context = desk.identity.calling(desk.target.endpoint.certificate)
    with desk.call() as sock, context.wrap_socket(sock) as call:
        call.sendall(wire.Hello(WRITER, READER, SHAPE.slot_bytes, address.key).pack())
        assert call.recv(64) == wire.pack_welcome(wire.Verdict.WELCOME)
        call.sendall(bytes(32))
        call.sendall(wire.pack_batch(1, [(REF, 5)], desk.seal) + b"plain")
        assert is_cut(call)
    assert desk.stored == b""


# For how long


def test_a_key_is_renewed_and_no_ticket_ends_with_the_old_connection(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_writer, "_RENEW_BYTES", 2 * len(SECRET))
    writer, streams = desk.writer(), set()
    for _ in range(6):
        desk.put(writer)
        streams.add(writer._stream)
        assert not desk.target.is_dead(WRITER)
    assert len(streams) == 3
    until(lambda: len(desk.target._threads) == 1)
    assert not desk.target.is_dead(WRITER)


# What is configured


@pytest.mark.parametrize("tls", [False])
def test_a_writer_that_requires_tls_does_not_write_in_the_clear(desk: Desk, tls: bool) -> None:
    endpoint: LinkEndpoint = desk.target.endpoint
    with pytest.raises(Incompatible, match="TLS is required here"):
        open_link(endpoint, writer=WRITER, settings=LinkSettings())
    link = open_link(endpoint, writer=WRITER, settings=LinkSettings(tls=False))
    link.send([(REF, memoryview(SECRET))], desk.seal)
    link.confirm()
    link.close()
    assert desk.stored == SECRET
