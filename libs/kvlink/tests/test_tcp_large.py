"""Batches of megabytes over tcp: many slots are filled by one call, and who waits is woken late."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from diptych_contracts.errors import Refused
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.transfers import SlotRef
from diptych_contracts.wire import encode
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

WRITER, TRANSFER = Incarnation("prefill-worker-1"), transfer_id(RequestId("r1"), 1)
SHAPE = PoolShape(slots=40, slot_bytes=300_000)
REFS = [SlotRef(slot=slot, generation=3) for slot in range(SHAPE.slots)]
HANGS_S = 60.0
both = pytest.mark.parametrize("tls", [False, True])


class Desk:
    """A reader with every slot open to one writer."""

    def __init__(self, tls: bool) -> None:
        office, self.identity = TicketOffice(lambda: 0.0), LinkIdentity()
        self.target = TcpTarget(
            "decode-worker-1",
            private_slots(SHAPE),
            slot_bytes=SHAPE.slot_bytes,
            listening=Listening("127.0.0.1", 0, HANGS_S, "host-1", tls),
            guard=Guard(office, Tally()),
        )
        self.target.expect(WRITER, self.identity.certificate)
        for ref in REFS:
            self.target.admit(ref.slot, ref.generation, WRITER, TRANSFER)
        self.seal = encode(office.seal(a_generation("r1"), WRITER, slots=b"", deadline_s=10.0))

    def stored(self, slot: int, n_bytes: int = SHAPE.slot_bytes) -> bytes:
        return bytes(self.target.view(slot, n_bytes))


@contextmanager
def a_desk(tls: bool) -> Iterator[Desk]:
    desk = Desk(tls)
    try:
        yield desk
    finally:
        desk.target.close()


@contextmanager
def a_writer(desk: Desk) -> Iterator[TcpWriter]:
    writer = TcpWriter(desk.target.endpoint, WRITER, stall_s=HANGS_S, identity=desk.identity)
    try:
        yield writer
    finally:
        writer.close()


@both
def test_blocks_of_many_sizes_arrive_each_in_its_slot(tls: bool) -> None:
    sizes = [300_000, 1, 299_999, 131_072, 131_073, 16, 262_144, 5] * 5
    blocks = [os.urandom(size) for size in sizes]
    with a_desk(tls) as desk, a_writer(desk) as writer:
        for _ in range(2):
            sent = [(ref, memoryview(block)) for ref, block in zip(REFS, blocks, strict=True)]
            writer.send(sent, desk.seal)
            writer.confirm()
        for ref, block in zip(REFS, blocks, strict=True):
            assert desk.stored(ref.slot, len(block)) == block
            assert not any(desk.stored(ref.slot)[len(block) :])


@both
def test_slots_that_are_closed_take_nothing_and_their_neighbours_everything(tls: bool) -> None:
    closed = {0, 1, 7, 20, 39}
    with a_desk(tls) as desk, a_writer(desk) as writer:
        for slot in closed:
            desk.target.admit(slot, 0)
        blocks = [bytes([ref.slot + 1]) * SHAPE.slot_bytes for ref in REFS]
        sent = [(ref, memoryview(block)) for ref, block in zip(REFS, blocks, strict=True)]
        writer.send(sent, desk.seal)
        with pytest.raises(Refused, match="slot 0 is closed for generation 3"):
            writer.confirm()
        for ref, block in zip(REFS, blocks, strict=True):
            expected = bytes(SHAPE.slot_bytes) if ref.slot in closed else block
            assert desk.stored(ref.slot) == expected


def test_what_comes_slowly_is_stored_all_the_same() -> None:
    """A reader that is owed much sleeps until much is there, but not for long."""
    with a_desk(tls=False) as desk:
        address = TcpAddress.parse(desk.target.endpoint.address)
        hello = wire.Hello(WRITER, address.reader, SHAPE.slot_bytes, address.key)
        with socket.create_connection((address.host, address.port), timeout=HANGS_S) as sock:
            sock.sendall(hello.pack())
            assert sock.recv(wire.WELCOME.size) == wire.pack_welcome(wire.Verdict.WELCOME)
            sizes = [(ref, SHAPE.slot_bytes) for ref in REFS]
            sock.sendall(wire.pack_batch(1, sizes, desk.seal))
            sock.sendall(b"a" * 1000)
            give_up_s = time.monotonic() + HANGS_S
            while desk.stored(0, 1000) != b"a" * 1000:
                assert time.monotonic() < give_up_s
                time.sleep(0.01)
            sock.sendall(b"b" * (len(REFS) * SHAPE.slot_bytes - 1000))
            assert sock.recv(wire.ACK.size) == wire.pack_ack(1, [wire.Stored.STORED] * 40)[:10]
        assert desk.stored(39) == b"b" * SHAPE.slot_bytes
