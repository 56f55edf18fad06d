"""What crosses a KV port: handshakes, certificates, greetings, batches, tickets and answers."""

import socket
import ssl
from functools import cache
from random import Random

from diptych_contracts.errors import DiptychError, Incompatible
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.transfers import SlotRef
from diptych_contracts.wire import encode
from diptych_kvlink import tcp_wire as wire
from diptych_kvlink.link_identity import LinkIdentity, check_certificate
from diptych_kvlink.sealing import TicketOffice
from diptych_kvlink.slot_gates import Holder, SlotGates
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_receiving import Guard, Identity, Receiving, TurnedDown
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.tls_stream import TlsStream
from diptych_testkit.builders import a_generation
from diptych_testkit.fuzzing.bending import bent_bytes
from diptych_testkit.fuzzing.cases import Parser
from diptych_testkit.fuzzing.kv_samples import CERTIFICATE, GREETING

_KEY = bytes(range(16))
_SLOTS, _SLOT_BYTES = 4, 256
_WRITER = Incarnation("prefill-worker-1")


def parsers() -> list[Parser]:
    """All of them."""
    told = (DiptychError, wire.Garbled, TurnedDown)
    return [
        Parser(name="kv-frames", make=_session, read=_receive, told=told, cases=2000),
        Parser(name="kv-answers", make=_answer, read=_read_answer, told=told, cases=15_000),
        Parser(name="kv-handshakes", make=_handshake, read=_shake_hands, cases=1000),
        Parser(name="kv-certificates", make=_certificate, read=_trust, cases=600),
    ]


@cache
def office() -> TicketOffice:
    """One whose secret is known: a case has the same bytes in every process."""
    made = TicketOffice(lambda: 0.0)
    made._secret = bytes(32)
    return made


@cache
def _seals() -> tuple[bytes, ...]:
    """Of the transfer whose slot is open; of another; one that is over."""
    return tuple(
        encode(office().seal(a_generation(name), _WRITER, slots=b"", deadline_s=end_s))
        for name, end_s in (("r1", 9.0), ("r2", 9.0), ("r1", -1.0))
    )


def _session(rng: Random) -> bytes:
    """What a writer says on a connection, bent."""
    hello = wire.Hello(_WRITER, "reader-1", _SLOT_BYTES, _KEY).pack()
    said = [hello]
    for number in range(rng.randrange(4)):
        blocks = [
            (SlotRef(slot=rng.randrange(_SLOTS + 1), generation=rng.choice((0, 1, 7))), n_bytes)
            for n_bytes in rng.choices((1, 17, _SLOT_BYTES), k=rng.randrange(1, 5))
        ]
        seal = rng.choice((*_seals(), _seals()[0], b""))
        if rng.random() < 0.2:
            seal = bent_bytes(rng, seal)[: wire.MAX_SEAL_BYTES]
        said.append(wire.pack_batch(number, blocks, seal))
        said += [rng.randbytes(n_bytes) for _, n_bytes in blocks]
    if rng.random() < 0.5:
        at = rng.randrange(len(said))
        said[at] = bent_bytes(rng, said[at], said)
        return b"".join(said)
    data = b"".join(said)
    return data if rng.random() < 0.2 else hello + bent_bytes(rng, data[len(hello) :], [data])


def _connected() -> tuple[socket.socket, socket.socket]:
    far = socket.create_connection(_listener().getsockname())
    return _listener().accept()[0], far


@cache
def _listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _receive(data: bytes) -> None:
    """A whole connection; not one byte outside of the slot that is open."""
    memory = bytearray(_SLOTS * _SLOT_BYTES)
    whole = memoryview(memory)
    slots = [whole[n * _SLOT_BYTES : (n + 1) * _SLOT_BYTES] for n in range(_SLOTS)]
    gates = SlotGates(slots)
    gates.set(1, 7, Holder(_WRITER, TransferId("r1.1")))
    near, far = _connected()
    identity = Identity("reader-1", _SLOT_BYTES, _KEY)
    stream = TcpStream(near, stall_s=1.0)
    try:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        guard = Guard(office(), Tally())
        receiving = Receiving(
            stream, gates, identity, guard, greeted=lambda _: wire.Verdict.WELCOME
        )
        receiving.run(stream.deadline_s(0))
    finally:
        stream.close()
        far.close()
        others = memory[:_SLOT_BYTES] + memory[2 * _SLOT_BYTES :]
        assert not any(others), "bytes were written into a slot that is not open"


def _answer(rng: Random) -> tuple[str, bytes]:
    kind = rng.choice(("hello", "welcome", "batch", "ack"))
    blocks = [(SlotRef(slot=1, generation=7), 9)] * rng.randrange(1, 5)
    good = {
        "hello": wire.Hello(_WRITER, "reader-1", _SLOT_BYTES, _KEY).pack(),
        "welcome": wire.pack_welcome(wire.Verdict.WELCOME),
        "batch": wire.pack_batch(1, blocks, rng.choice(_seals())),
        "ack": wire.pack_ack(1, [wire.Stored.STORED]),
    }[kind]
    return kind, bent_bytes(rng, good).ljust(64, b"\0")


def _read_answer(case: tuple[str, bytes]) -> None:
    """As the streams read: heads have their size."""
    kind, data = case
    match kind:
        case "hello":
            head, rest = data[: wire.HELLO.size], data[wire.HELLO.size :]
            names = rest.ljust(256, b"x")[: wire.hello_names_bytes(head)]
            hello = wire.unpack_hello(head, names)
            Identity("reader-1", _SLOT_BYTES, _KEY).judge(hello)
        case "welcome":
            wire.check_welcome(data[: wire.WELCOME.size], "there")
        case "batch":
            _read_batch(data)
        case _:
            wire.unpack_ack(data[: wire.ACK.size])


def _read_batch(data: bytes) -> None:
    head, rest = data[: wire.BATCH.size], data[wire.BATCH.size :]
    _, blocks, seal_bytes = wire.unpack_batch(head)
    seal, entries = rest[:seal_bytes], rest[seal_bytes:]
    entries = entries.ljust(blocks * wire.ENTRY.size, b"\1")
    found = wire.unpack_entries(
        entries[: blocks * wire.ENTRY.size], slots=_SLOTS, slot_bytes=_SLOT_BYTES
    )
    assert len(found) == blocks
    assert office().check_write(seal, _WRITER) in ("r1.1", "r2.1")


@cache
def _reader() -> LinkIdentity:
    return LinkIdentity()


@cache
def _answering() -> ssl.SSLContext:
    return _reader().answering([LinkIdentity().certificate])


def _handshake(rng: Random) -> bytes:
    data = bent_bytes(rng, GREETING, [GREETING])
    if rng.random() < 0.3:  # More of it, as a second flight would be.
        data += bent_bytes(rng, GREETING)
    return data


def _shake_hands(data: bytes) -> None:
    """Nobody gets in without the key of a certificate that is trusted."""
    near, far = _connected()
    stream = TlsStream(near, _answering(), calls=False, stall_s=1.0)
    try:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        stream.shake_hands(stream.deadline_s(0))
        raise AssertionError("a stranger has shaken hands")
    finally:
        stream.close()
        far.close()


def _certificate(rng: Random) -> bytes:
    return CERTIFICATE if rng.random() < 0.1 else bent_bytes(rng, CERTIFICATE, [CERTIFICATE])


def _trust(data: bytes) -> None:
    """What is taken for a certificate harms no context that trusts others besides."""
    check_certificate(data)
    try:
        LinkIdentity().answering([data, _reader().certificate])
    except ssl.SSLError as err:
        raise AssertionError("one bad certificate keeps everybody out") from err
    try:
        LinkIdentity().calling(data)
    except ssl.SSLError as err:
        raise Incompatible(str(err)) from err
