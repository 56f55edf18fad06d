"""The tcp link by itself: what a good, a slow, a hung, a garbled and a lying peer can do."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import Incompatible, LinkBroken, Refused
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.transfers import SlotRef
from diptych_contracts.wire import encode
from diptych_kvlink import tcp_callers, tcp_writer
from diptych_kvlink import tcp_wire as wire
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.pool_file import PoolShape, private_slots
from diptych_kvlink.sealing import TicketOffice
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_address import TcpAddress
from diptych_kvlink.tcp_listening import Listening
from diptych_kvlink.tcp_receiving import Guard
from diptych_kvlink.tcp_target import TcpTarget
from diptych_kvlink.tcp_writer import TcpWriter
from diptych_testkit.builders import a_generation
from diptych_testkit.ports import free_port

READER, WRITER = "decode-worker-1", Incarnation("prefill-worker-1")
SHAPE = PoolShape(slots=4, slot_bytes=50_000)
STALL_S = 1.0
"""Where a stall is the point; elsewhere a busy machine must not look like one."""
HANGS_S = 60.0
test_is_over = threading.Event()
REF = SlotRef(slot=1, generation=7)
TRANSFER = transfer_id(RequestId("r1"), 1)
both = pytest.mark.parametrize("tls", [False, True])
"""Whether through TLS; what speaks for itself here does not."""


@dataclass
class Desk:
    """Who gives tickets to the writers of a test, and what their reader counts."""

    guard: Guard
    identities: dict[str, LinkIdentity]

    def seal(self, writer: str = WRITER, deadline_s: float = 10.0) -> bytes:
        seal = self.guard.office.seal(
            a_generation("r1"), Incarnation(writer), slots=b"", deadline_s=deadline_s
        )
        return encode(seal)


@pytest.fixture
def tls() -> bool:
    return False


@pytest.fixture
def desk() -> Desk:
    return Desk(Guard(TicketOffice(lambda: 0.0), Tally()), {})


@pytest.fixture
def stall_s() -> float:
    """How patient readers and writers are."""
    return HANGS_S


@pytest.fixture
def target(stall_s: float, tls: bool, desk: Desk) -> Iterator[TcpTarget]:
    target = TcpTarget(
        READER,
        private_slots(SHAPE),
        slot_bytes=SHAPE.slot_bytes,
        listening=Listening("127.0.0.1", 0, stall_s, "host-1", tls),
        guard=desk.guard,
    )
    yield target
    target.close()
    target.close()


@pytest.fixture
def make_writer(
    target: TcpTarget, stall_s: float, desk: Desk
) -> Iterator[Callable[..., TcpWriter]]:
    writers: list[TcpWriter] = []

    def make(writer: str = WRITER, **changes: Any) -> TcpWriter:
        endpoint = msgspec.structs.replace(target.endpoint, **changes)
        identity = desk.identities.setdefault(writer, LinkIdentity())
        target.expect(Incarnation(writer), identity.certificate)
        writers.append(TcpWriter(endpoint, Incarnation(writer), stall_s=stall_s, identity=identity))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


@pytest.fixture
def raw(target: TcpTarget) -> Iterator[Callable[[], socket.socket]]:
    """Connections that speak for themselves."""
    with contextlib.ExitStack() as stack:

        def call() -> socket.socket:
            address = TcpAddress.parse(target.endpoint.address)
            sock = socket.create_connection((address.host, address.port), timeout=HANGS_S)
            return stack.enter_context(sock)

        yield call


def hello(target: TcpTarget, writer: str = WRITER, **changes: Any) -> bytes:
    key = TcpAddress.parse(target.endpoint.address).key
    fields: dict[str, Any] = {"reader": READER, "slot_bytes": SHAPE.slot_bytes, "key": key}
    return wire.Hello(writer=Incarnation(writer), **(fields | changes)).pack()


def greeted(call: Callable[[], socket.socket], target: TcpTarget, **changes: Any) -> socket.socket:
    sock = call()
    sock.sendall(hello(target, **changes))
    assert sock.recv(wire.WELCOME.size) == wire.pack_welcome(wire.Verdict.WELCOME)
    return sock


def is_cut(sock: socket.socket) -> bool:
    """Whether the reader closes; waits for it."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def put(writer: TcpWriter, desk: Desk, ref: SlotRef, data: bytes) -> None:
    writer.send([(ref, memoryview(data))], desk.seal(writer._writer))
    writer.confirm()


def batch(desk: Desk, ref: SlotRef, data: bytes, n_bytes: int | None = None) -> bytes:
    size = len(data) if n_bytes is None else n_bytes
    return wire.pack_batch(1, [(ref, size)], desk.seal()) + data


@both
def test_a_batch_arrives_whole_and_over_one_connection(
    desk: Desk, target: TcpTarget, make_writer: Callable[..., TcpWriter]
) -> None:
    writer = make_writer()
    refs = [SlotRef(slot=slot, generation=3) for slot in range(4)]
    for ref in refs:
        target.admit(ref.slot, 3, WRITER, TRANSFER)
    blocks = [bytes([ref.slot + 1]) * 50_000 for ref in refs]

    for size in (50_000, 1, 49_999):
        sizes = [(ref, memoryview(b)[:size]) for ref, b in zip(refs, blocks, strict=True)]
        writer.send(sizes, desk.seal())
        writer.confirm()

    assert [bytes(target.view(ref.slot, 50_000)) for ref in refs] == blocks
    assert len(target._callers._writers) == 1
    assert len(target._threads) == 1


@both
def test_only_the_tickets_writer_under_the_tickets_generation_may_write(
    desk: Desk, target: TcpTarget, make_writer: Callable[..., TcpWriter]
) -> None:
    target.admit(1, 7, WRITER, TRANSFER)
    writer, stranger = make_writer(), make_writer("prefill-worker-2")

    for who, ref in [
        (writer, SlotRef(slot=1, generation=6)),
        (writer, SlotRef(slot=1, generation=8)),
        (writer, SlotRef(slot=2, generation=0)),
        (stranger, REF),
    ]:
        with pytest.raises(Refused) as caught:
            put(who, desk, ref, b"x" * 50_000)
        assert caught.value.reason == "unknown_ticket"
    put(writer, desk, REF, b"good")

    assert bytes(target.view(1, 5)) == b"good\0"
    assert bytes(target.view(2, 50_000)) == bytes(50_000)


@both
def test_a_refused_block_harms_no_other_of_its_batch(
    desk: Desk, target: TcpTarget, make_writer: Callable[..., TcpWriter]
) -> None:
    target.admit(0, 7, WRITER, TRANSFER)
    target.admit(2, 7, WRITER, TRANSFER)
    writer = make_writer()
    refs = [SlotRef(slot=slot, generation=7) for slot in range(3)]

    blocks = [(ref, memoryview(bytes([ref.slot + 1]) * 50_000)) for ref in refs]
    writer.send(blocks, desk.seal())
    with pytest.raises(Refused, match="slot 1 is closed for generation 7"):
        writer.confirm()

    held = [bytes(target.view(slot, 50_000)) for slot in range(3)]
    assert held == [b"\1" * 50_000, bytes(50_000), b"\3" * 50_000]


def test_a_slot_named_twice_in_a_batch_holds_what_came_last(
    desk: Desk, target: TcpTarget, raw: Callable[[], socket.socket]
) -> None:
    target.admit(1, 7, WRITER, TRANSFER)
    sock = greeted(raw, target)
    sock.sendall(wire.pack_batch(1, [(REF, 3), (REF, 3)], desk.seal()) + b"oneTWO")

    assert sock.recv(64) == wire.pack_ack(1, [wire.Stored.STORED, wire.Stored.STORED])
    assert bytes(target.view(1, 4)) == b"TWO\0"


def test_a_slot_closed_in_mid_block_takes_not_one_more_byte(
    desk: Desk, target: TcpTarget, raw: Callable[[], socket.socket]
) -> None:
    target.admit(1, 7, WRITER, TRANSFER)
    sock = greeted(raw, target)
    sock.sendall(batch(desk, REF, b"a" * 20_000, 50_000))
    until(lambda: target.view(1, 20_000)[-1] == ord("a"))

    target.admit(1, 0)
    target.admit(1, 8, WRITER, TRANSFER)
    sock.sendall(b"b" * 30_000)

    assert sock.recv(64) == wire.pack_ack(1, [wire.Stored.CLOSED])
    assert bytes(target.view(1, 50_000)) == b"a" * 20_000 + bytes(30_000)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\0" * 200,
        wire.HELLO.pack(b"XXXXXXX", 1, 50_000, 10, 10, bytes(16)),
        wire.HELLO.pack(wire.MAGIC, 1, 50_000, 60_000, 60_000, bytes(16)),
        wire.HELLO.pack(wire.MAGIC, 1, 50_000, 0, 3, bytes(16)) + b"abc",
        wire.HELLO.pack(wire.MAGIC, 1, 50_000, 3, 0, bytes(16)) + b"\xff\xfe\xfd",
        wire.HELLO.pack(wire.MAGIC, 1, 50_000, 3, 0, bytes(16)) + b"a\nb",
    ],
)
def test_noise_is_cut_off_with_one_clear_line(
    target: TcpTarget, raw: Callable[[], socket.socket], noise: bytes, caplog: Any
) -> None:
    sock = raw()
    sock.sendall(noise)

    assert is_cut(sock)
    until(lambda: not target._threads)
    (line,) = caplog.messages
    assert "127.0.0.1:" in line
    assert "is cut off" in line


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"version": 1}, wire.Verdict.OTHER_VERSION),
        ({"reader": "decode-worker-2"}, wire.Verdict.OTHER_READER),
        ({"key": bytes(16)}, wire.Verdict.WRONG_KEY),
        ({"slot_bytes": 49_999}, wire.Verdict.OTHER_SLOT_SIZE),
    ],
)
def test_who_does_not_mean_this_reader_is_told_why_and_cut_off(
    target: TcpTarget,
    raw: Callable[[], socket.socket],
    changes: dict[str, Any],
    verdict: wire.Verdict,
) -> None:
    sock = raw()
    sock.sendall(hello(target, **changes))

    assert sock.recv(64) == wire.pack_welcome(verdict)
    assert is_cut(sock)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * 64,
        wire.BATCH.pack(b"BLKS", 1, 0, 0),
        wire.BATCH.pack(b"BLKS", 1, 65_535, 0),
        wire.BATCH.pack(b"BLKS", 1, 1, 4097),
        wire.BATCH.pack(b"BLKS", 1, 1, 0) + wire.ENTRY.pack(1, 7, 0xFFFFFFFF),
        wire.BATCH.pack(b"BLKS", 1, 1, 0) + wire.ENTRY.pack(1, 7, 50_001),
        wire.BATCH.pack(b"BLKS", 1, 1, 0) + wire.ENTRY.pack(1, 7, 0),
        wire.BATCH.pack(b"BLKS", 1, 1, 0) + wire.ENTRY.pack(4, 7, 10),
        wire.BATCH.pack(b"BLKS", 1, 1, 0) + wire.ENTRY.pack(0xFFFFFFFF, 7, 10),
    ],
)
def test_a_garbled_batch_ends_its_connection_and_nobody_elses(
    desk: Desk,
    target: TcpTarget,
    raw: Callable[[], socket.socket],
    make_writer: Callable[..., TcpWriter],
    frame: bytes,
    caplog: Any,
) -> None:
    target.admit(1, 7, WRITER, TRANSFER)
    target.admit(2, 7, Incarnation("prefill-worker-2"), TRANSFER)
    other = make_writer("prefill-worker-2")
    other.connect()
    sock = greeted(raw, target)
    sock.sendall(frame)

    assert is_cut(sock)
    put(other, desk, SlotRef(slot=2, generation=7), b"unharmed")

    assert bytes(target.view(2, 8)) == b"unharmed"
    assert bytes(target.view(1, 50_000)) == bytes(50_000)
    until(lambda: f"{WRITER} at 127.0.0.1" in caplog.text)


@pytest.mark.parametrize("stall_s", [STALL_S])
@pytest.mark.parametrize("after", ["nothing", "half a hello", "a hello", "half a block"])
def test_a_silent_peer_is_cut_off_in_time_if_it_owes_something(
    desk: Desk, target: TcpTarget, raw: Callable[[], socket.socket], after: str
) -> None:
    target.admit(1, 7, WRITER, TRANSFER)
    sock = greeted(raw, target) if after in ("a hello", "half a block") else raw()
    match after:
        case "half a hello":
            sock.sendall(hello(target)[:20])
        case "half a block":
            sock.sendall(batch(desk, REF, b"a" * 20_000, 50_000))

    if after == "a hello":
        sock.settimeout(3 * STALL_S)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert not target.is_dead(WRITER)
    else:
        assert is_cut(sock)
        until(lambda: target.is_dead(WRITER) == (after == "half a block"))


def trickle(sock: socket.socket, for_s: float) -> None:
    began_s = time.monotonic()
    while time.monotonic() - began_s < for_s:
        sock.sendall(b"a")
        time.sleep(STALL_S / 8)


@pytest.mark.parametrize("stall_s", [STALL_S])
def test_a_trickle_is_too_slow(
    desk: Desk, target: TcpTarget, raw: Callable[[], socket.socket]
) -> None:
    """A byte every now and then never stalls, and would hold the connection for ever."""
    target.admit(1, 7, WRITER, TRANSFER)
    sock = greeted(raw, target)
    sock.sendall(batch(desk, REF, b"", 50_000))
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        trickle(sock, for_s=HANGS_S)


@pytest.mark.parametrize("stall_s", [60.0])
def test_strangers_are_few_and_writers_still_get_in(
    desk: Desk,
    target: TcpTarget,
    raw: Callable[[], socket.socket],
    make_writer: Callable[..., TcpWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(tcp_callers, "MOST_STRANGERS", 3)
    early = make_writer()
    early.connect()
    strangers: list[socket.socket] = []
    while len(strangers) < 3:  # each has its thread: one by one, or the first is not the oldest
        strangers.append(raw())
        until(lambda: len(target._callers._strangers) == len(strangers))

    newest = raw()
    assert is_cut(strangers[0])
    until(lambda: "too many unknown connections; the oldest is cut off" in caplog.text)
    target.admit(1, 7, WRITER, TRANSFER)
    put(early, desk, REF, b"still here")
    make_writer("prefill-worker-2").connect()
    for stranger in (newest, *strangers):
        stranger.close()
    until(lambda: not target._callers._strangers)


@both
def test_a_writer_that_calls_again_replaces_its_older_connection(
    desk: Desk, target: TcpTarget, make_writer: Callable[..., TcpWriter]
) -> None:
    older, newer = make_writer(), make_writer()
    older.connect()
    newer.connect()
    until(lambda: not older.is_ready)

    assert not target.is_dead(WRITER)
    assert newer.is_ready
    newer.close()
    until(lambda: target.is_dead(WRITER))
    target.expect(WRITER, desk.identities[WRITER].certificate)
    assert not target.is_dead(WRITER)


@both
def test_a_writer_that_leaves_is_no_reason_to_warn(
    target: TcpTarget, make_writer: Callable[..., TcpWriter], caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    writer = make_writer()
    writer.connect()

    writer.close()
    until(lambda: not target._threads)

    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert f"{WRITER} at 127.0.0.1" in record.getMessage()
    assert target.is_dead(WRITER)


@both
def test_a_connection_that_ended_while_idle_is_made_again(
    desk: Desk, target: TcpTarget, make_writer: Callable[..., TcpWriter]
) -> None:
    writer = make_writer()
    target.admit(1, 7, WRITER, TRANSFER)
    put(writer, desk, REF, b"one")
    target._callers._writers[WRITER].hang_up()
    until(writer.reader_is_gone)

    put(writer, desk, REF, b"two")

    assert bytes(target.view(1, 3)) == b"two"


@both
def test_an_ack_nobody_waited_for_is_passed_over(
    desk: Desk, target: TcpTarget, make_writer: Callable[..., TcpWriter]
) -> None:
    writer = make_writer()
    target.admit(1, 7, WRITER, TRANSFER)
    writer.send([(SlotRef(slot=0, generation=7), memoryview(b"refused"))])

    put(writer, desk, REF, b"good")

    assert bytes(target.view(1, 4)) == b"good"


def test_a_closed_writer_and_a_slot_that_is_not_there_are_refused(
    make_writer: Callable[..., TcpWriter],
) -> None:
    writer = make_writer()
    with pytest.raises(Refused, match="no slot 4"):
        writer.buffer(SlotRef(slot=4, generation=7))
    writer.close()
    with pytest.raises(Refused, match="link is closed"):
        writer.buffer(REF)
    with pytest.raises(LinkBroken, match="link is closed"):
        writer.send([(REF, memoryview(b"x"))])
    with pytest.raises(LinkBroken):
        writer.confirm()


# The writer's peers


@pytest.fixture
def impostor() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """A listener that behaves as a test wants; gives its address."""
    test_is_over.clear()
    with contextlib.ExitStack() as stack:

        def listen(behave: Callable[[socket.socket], None]) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with listener.accept()[0] as sock, contextlib.suppress(OSError):
                    behave(sock)

            thread = threading.Thread(target=serve)
            thread.start()
            stack.callback(thread.join, HANGS_S)
            stack.callback(test_is_over.set)
            port = listener.getsockname()[1]
            return str(TcpAddress("127.0.0.1", port, READER, bytes(16)))

        yield listen


def welcome(sock: socket.socket) -> None:
    sock.recv(4096)
    sock.sendall(wire.pack_welcome(wire.Verdict.WELCOME))


def hold(sock: socket.socket) -> None:
    """Say nothing and read nothing, as a frozen process does."""
    test_is_over.wait(HANGS_S)


@pytest.mark.parametrize("stall_s", [STALL_S])
@pytest.mark.parametrize(
    ("behave", "n_bytes", "message"),
    [
        (hold, 10, "is silent for too long"),
        (lambda sock: (welcome(sock), hold(sock)), 10, "is silent for too long"),
        (lambda sock: (welcome(sock), hold(sock)), 60_000_000, "takes nothing for too long"),
    ],
)
def test_a_reader_that_hangs_breaks_the_link_in_time(
    desk: Desk,
    impostor: Any,
    make_writer: Callable[..., TcpWriter],
    behave: Any,
    n_bytes: int,
    message: str,
) -> None:
    breaks(make_writer(address=impostor(behave)), desk, n_bytes, message)


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (welcome, "closed|reset|Broken pipe"),
        (lambda sock: (welcome(sock), sock.recv(4096), sock.sendall(b"\xff" * 99)), "an ack"),
    ],
)
def test_a_reader_that_dies_or_talks_nonsense_breaks_the_link(
    desk: Desk, impostor: Any, make_writer: Callable[..., TcpWriter], behave: Any, message: str
) -> None:
    breaks(make_writer(address=impostor(behave)), desk, 10, message)


def breaks(writer: TcpWriter, desk: Desk, n_bytes: int, message: str) -> None:
    with pytest.raises(LinkBroken, match=message):
        put(writer, desk, REF, bytes(n_bytes))

    assert writer.reader_is_gone()
    with pytest.MonkeyPatch.context() as moment:
        moment.setattr(tcp_writer, "_RETRY_S", HANGS_S)
        with pytest.raises(LinkBroken, match="failed a moment ago"):
            put(writer, desk, REF, b"x")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400", "answered"),
        (wire.WELCOME.pack(wire.MAGIC, 2, 0), "answered"),
        (wire.WELCOME.pack(wire.ANSWER_MAGIC, 2, 99), "answered"),
        (wire.pack_welcome(wire.Verdict.WRONG_KEY), "turned this writer away: wrong key"),
    ],
)
def test_an_impostor_gets_no_block(
    desk: Desk, impostor: Any, make_writer: Callable[..., TcpWriter], answer: bytes, message: str
) -> None:
    heard = []

    def behave(sock: socket.socket) -> None:
        heard.append(sock.recv(4096))
        sock.sendall(answer)
        while data := sock.recv(4096):
            heard.append(data)

    writer = make_writer(address=impostor(behave))

    with pytest.raises(Incompatible, match=message):
        put(writer, desk, REF, b"secret" * 1000)

    assert b"secret" not in b"".join(heard)


def test_nobody_listening_is_a_broken_link(make_writer: Callable[..., TcpWriter]) -> None:
    port = free_port()
    writer = make_writer(address=str(TcpAddress("127.0.0.1", port, READER, bytes(16))))
    with pytest.raises(LinkBroken, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
        writer.connect()


def test_closing_a_reader_cuts_its_writers_and_leaves_no_thread(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    before = set(threading.enumerate())
    target = TcpTarget(
        READER,
        private_slots(SHAPE),
        slot_bytes=SHAPE.slot_bytes,
        listening=Listening("127.0.0.1", 0, HANGS_S, "host-1", False),
        guard=Guard(TicketOffice(lambda: 0.0), Tally()),
    )
    writer = TcpWriter(target.endpoint, WRITER, stall_s=HANGS_S)
    writer.connect()

    target.close()

    assert not writer.is_ready
    assert set(threading.enumerate()) <= before
    assert caplog.messages == []
    writer.close()


def until(holds: Callable[[], Any]) -> None:
    give_up_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)
