"""What crosses KV links: greetings, batches, reservations, addresses, and files of memory."""

import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.jobs import BlockDigest, DecodeJob
from diptych_contracts.journal import Report
from diptych_contracts.transfers import LinkEndpoint, Release, Reserve, SlotRef, Ticket
from diptych_contracts.wire import decode, encode
from diptych_kvlink import tcp_wire as wire
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.links import SHM, LinkSettings, open_link
from diptych_kvlink.lockfile import PREFIX, host_id, sweep_leftovers
from diptych_kvlink.pool_file import PoolShape, map_pool
from diptych_kvlink.shm import ShmPool
from diptych_kvlink.slot_gates import SlotGates
from diptych_kvlink.tcp_address import TcpAddress
from diptych_kvlink.tcp_receiving import Identity, Receiving
from diptych_kvlink.tcp_stream import TcpStream
from diptych_testkit.builders import FINGERPRINT, a_generation
from diptych_testkit.fuzzing.bending import NUMBERS, bent_bytes, bent_text, bent_tree
from diptych_testkit.fuzzing.bus_parsers import message_kinds
from diptych_testkit.fuzzing.cases import Parser

_KEY = bytes(range(16))
_SLOTS, _SLOT_BYTES, _BLOCK_TOKENS = 4, 256, 4
_LAYOUT = KvLayout(
    layout_id="fuzz",
    engine_build="1",
    block_tokens=_BLOCK_TOKENS,
    slot_bytes=_SLOT_BYTES,
    dtype="f16",
)
_WRITER = Incarnation("prefill-worker-1")


def parsers() -> list[Parser]:
    """All of them."""
    told = (DiptychError, wire.Garbled)
    return [
        Parser(name="kv-frames", make=_session, read=_receive, told=told, cases=2000),
        Parser(name="kv-answers", make=_answer, read=_read_answer, told=told, cases=15_000),
        Parser(name="kv-tickets", make=_messages, read=_transfers, cases=500),
        Parser(name="kv-addresses", make=_address, read=_open, cases=2500),
        Parser(name="kv-files", make=_pool_file, read=_map, cases=1500),
    ]


def _session(rng: Random) -> bytes:
    """What a writer says on a connection, bent."""
    hello = wire.Hello(_WRITER, "reader-1", _SLOT_BYTES, _KEY).pack()
    said = [hello]
    for number in range(rng.randrange(4)):
        blocks = [
            (SlotRef(slot=rng.randrange(_SLOTS + 1), generation=rng.choice((0, 1, 7))), n_bytes)
            for n_bytes in rng.choices((1, 17, _SLOT_BYTES), k=rng.randrange(1, 5))
        ]
        said.append(wire.pack_batch(number, blocks))
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
    gates.set(1, 7, _WRITER)
    near, far = _connected()
    identity = Identity("reader-1", _SLOT_BYTES, _KEY)
    stream = TcpStream(near, stall_s=1.0)
    try:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        Receiving(stream, gates, identity, greeted=lambda _: wire.Verdict.WELCOME).run()
    finally:
        stream.close()
        far.close()
        others = memory[:_SLOT_BYTES] + memory[2 * _SLOT_BYTES :]
        assert not any(others), "bytes were written into a slot that is not open"


def _answer(rng: Random) -> tuple[str, bytes]:
    kind = rng.choice(("hello", "welcome", "batch", "ack"))
    good = {
        "hello": wire.Hello(_WRITER, "reader-1", _SLOT_BYTES, _KEY).pack(),
        "welcome": wire.pack_welcome(wire.Verdict.WELCOME),
        "batch": wire.pack_batch(1, [(SlotRef(slot=1, generation=7), 9)] * rng.randrange(1, 5)),
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
            _, blocks = wire.unpack_batch(data[: wire.BATCH.size])
            entries = data[wire.BATCH.size :].ljust(blocks * wire.ENTRY.size, b"\1")
            found = wire.unpack_entries(
                entries[: blocks * wire.ENTRY.size], slots=_SLOTS, slot_bytes=_SLOT_BYTES
            )
            assert len(found) == blocks
        case _:
            wire.unpack_ack(data[: wire.ACK.size])


@cache
def _folder() -> Path:
    """Memory that only these fuzzers share; it goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="diptych-fuzz-")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[Any] = []
_numbers: Iterator[int] = count()


def _settings() -> LinkSettings:
    return LinkSettings(kinds=(SHM,), directory=_folder(), stall_s=0.2)


def _reserve() -> Reserve:
    generation = a_generation("r1")
    return Reserve(
        transfer_id=transfer_id(RequestId("r1"), 1),
        generation=generation,
        prefill_worker=_WRITER,
        link=SHM,
        layout=_LAYOUT,
        fingerprint=FINGERPRINT,
        lease_ms=1000,
    )


def _job() -> DecodeJob:
    checksum = 0
    blocks = (BlockDigest(index=0, n_bytes=_SLOT_BYTES // 2, checksum=checksum),)
    return DecodeJob(
        generation=a_generation("r1"),
        prefill_worker=_WRITER,
        transfer_id=transfer_id(RequestId("r1"), 1),
        first_ids=(7,),
        blocks=blocks,
        report=Report(),
    )


def _bent(rng: Random, message: Any, names: tuple[str, ...]) -> Any:
    """`message` with other values of its types; itself if nobody could read it."""
    try:
        tree = bent_tree(rng, msgspec.msgpack.decode(encode(message)), names)
        return decode(msgspec.msgpack.encode(tree), type(message))
    except (DiptychError, OverflowError, RecursionError, UnicodeError, msgspec.MsgspecError):
        return message


def _messages(rng: Random) -> list[tuple[str, Any, int]]:
    """Reservations, claims and releases, some of them bent, in any order."""
    made: list[tuple[str, Any, int]] = []
    names = (*sorted({f for k in message_kinds().values() for f in k.__struct_fields__}), SHM)
    for _ in range(rng.randrange(2, 10)):
        kind = rng.choice(("reserve", "reserve", "claim", "release", "sweep"))
        good: Any = {
            "reserve": _reserve(),
            "claim": _job(),
            "release": Release(transfer_id=transfer_id(RequestId("r1"), 1)),
            "sweep": None,
        }[kind]
        if good is not None and rng.random() < 0.6:
            good = _bent(rng, good, names)
        made.append((kind, good, rng.choice((3, 3, 3, 1, 16, 17, 0, -4, 10**9))))
    return made


def _transfers(messages: list[tuple[str, Any, int]]) -> None:
    """Whatever comes in whatever order, no slot is lost, and nothing is read unverified."""
    incoming = IncomingTransfers(
        _LAYOUT,
        slots=_SLOTS,
        lease_s=5.0,
        name=f"decode-worker-{next(_numbers)}",
        links=_settings(),
        fingerprint=FINGERPRINT,
    )
    try:
        for now_s, (kind, message, tokens) in enumerate(messages):
            with suppress(DiptychError):
                _take(incoming, kind, message, tokens, now_s=float(now_s))
            incoming.check()
        incoming.sweep(1e9)
        incoming.sweep(2e9)
        incoming.check()
        assert all(t.reason for t in incoming.transfers(3e9)), "a ticket outlived its lease"
    finally:
        incoming.close()


def _take(
    incoming: IncomingTransfers, kind: str, message: Any, tokens: int, *, now_s: float
) -> None:
    match kind:
        case "reserve":
            ticket = incoming.reserve(message, tokens=tokens, now_s=now_s)
            assert isinstance(ticket, Ticket)
            encode(ticket)
        case "claim":
            incoming.claim(message, tokens=tokens, now_s=now_s)
        case "release":
            incoming.writer_stopped(message.transfer_id)
        case _:
            incoming.sweep(now_s)


def _address(rng: Random) -> LinkEndpoint:
    folder = _folder()
    tcp = "127.0.0.1:1/reader-1/" + _KEY.hex()
    text = rng.choice((tcp, str(folder / f"{PREFIX}x"), f"{folder}/../{PREFIX}x", "[::1]:1/r/00"))
    if rng.random() < 0.8:
        words = ("/", ":", "..", "\0", "a" * 70, ".", "é", "\u0660", "%", "[", "]", "_")
        text = bent_text(rng, text, words)
    good = LinkEndpoint(
        kind=rng.choice(("tcp", "shm", "shm", "rdma", "")),
        host=rng.choice((host_id(folder), host_id(folder), "", "x")),
        address=text,
        slots=rng.choice((_SLOTS, *(n for n in NUMBERS if isinstance(n, int) and abs(n) < 2**63))),
        slot_bytes=_SLOT_BYTES,
    )
    return good


def _open(endpoint: LinkEndpoint) -> None:
    """As a writer does. Names of other machines are not looked up here."""
    if endpoint.kind == "tcp":
        address = TcpAddress.parse(endpoint.address)
        assert TcpAddress.parse(str(address)) == address
        assert address.key.hex() not in address.where or not address.key
        odd = not address.host.isascii() or len(address.host) > 63 or not address.host[:1].isalnum()
        if not (odd or address.host in ("127.0.0.1", "::1")):
            return
    link = open_link(endpoint, writer=_WRITER, settings=_settings())
    try:
        if endpoint.kind == "tcp":
            link.connect()
        link.buffer(SlotRef(slot=1, generation=1))
    finally:
        link.close()


def _pool_file(rng: Random) -> tuple[LinkEndpoint, bytes, str]:
    shape = PoolShape(slots=_SLOTS, slot_bytes=_SLOT_BYTES)
    data = _pool_bytes(shape)
    if rng.random() < 0.8:
        head = bent_bytes(rng, data[:64])
        data = head + data[64:]
    numbers = [n for n in NUMBERS if isinstance(n, int) and abs(n) < 2**63]
    endpoint = LinkEndpoint(
        kind=SHM,
        host=host_id(_folder()),
        address=str(_folder() / f"{PREFIX}file"),
        slots=rng.choice((_SLOTS, _SLOTS, _SLOTS, *numbers)),
        slot_bytes=rng.choice((_SLOT_BYTES, _SLOT_BYTES, _SLOT_BYTES, *numbers)),
    )
    return endpoint, data, rng.choice(("file", "file", "file", "link", "folder", "none"))


@cache
def _pool_bytes(shape: PoolShape) -> bytes:
    pool = ShmPool("seed", shape, _folder())
    try:
        return Path(pool.endpoint.address).read_bytes()
    finally:
        pool.close()


def _map(case: tuple[LinkEndpoint, bytes, str]) -> None:
    endpoint, data, kind = case
    path = Path(endpoint.address)
    target = path.with_name("elsewhere")
    try:
        match kind:
            case "file":
                path.write_bytes(data)
            case "link":
                target.write_bytes(data)
                path.symlink_to(target)
            case "folder":
                path.mkdir()
        mapped = map_pool(endpoint, _folder())
        assert kind == "file"
        assert (mapped.shape.slots, mapped.shape.slot_bytes) == (
            endpoint.slots,
            endpoint.slot_bytes,
        )
        mapped.close()
    finally:
        sweep_leftovers(_folder())
        for left in (path, target):
            if left.is_dir():
                left.rmdir()
            else:
                left.unlink(missing_ok=True)
