"""The `nixl` link under faults, in two processes; over `tcp` transports too, where bytes linger."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import Incompatible, LinkBroken, Permanent, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint, SlotRef, Ticket
from diptych_contracts.wire import decode, encode
from diptych_kvlink import nixl_library
from diptych_kvlink.links import KINDS, LinkSettings, offered, open_link, open_targets, open_writing
from diptych_kvlink.nixl_address import NixlAddress, published
from diptych_kvlink.nixl_notes import Ask, Stopped, unpack
from diptych_kvlink.nixl_sources import Source
from diptych_kvlink.nixl_writer import Given, NixlWriter, NixlWriting, joined
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.writer_links import WriterLinks

WRITER = Incarnation("prefill-worker-n1")
BLOCKS, BLOCK_BYTES = 16, 1_000_000
needs_nixl = pytest.mark.skipif(bool(nixl_library.why_absent()), reason="NIXL is not installed")

READER_PROGRAM = textwrap.dedent(
    """
    import pathlib, sys
    from diptych_contracts.wire import encode
    from diptych_kvlink.nixl_target import NixlTarget
    from diptych_kvlink.pool_file import PoolShape, private_slots

    shape = PoolShape(16, 1_000_000)
    slots = private_slots(shape)
    target = NixlTarget(
        "decode-worker-n1", slots, shape=shape, network="loopback",
        directory=pathlib.Path(sys.argv[1]),
    )
    for slot in range(16):
        target.admit(slot, 1, "prefill-worker-n1", "r1.1")
    print(encode(target.endpoint).hex(), flush=True)
    for line in sys.stdin:
        print("".join(sorted({chr(byte) for slot in slots for byte in set(slot)})), flush=True)
    """
)

BLIND_WRITER_PROGRAM = textwrap.dedent(
    """
    import pathlib, sys
    from diptych_contracts.transfers import LinkEndpoint, SlotRef
    from diptych_contracts.wire import decode
    from diptych_kvlink.links import KINDS, LinkSettings, announce, open_link, open_writing
    from diptych_kvlink.nixl_plane import Post
    from diptych_kvlink.nixl_writer import NixlWriter

    def blind(self, batch):
        self._shared.on_their_way.add(batch)
        print("posted", flush=True)
        yield Post(
            "WRITE",
            [(source, n_bytes, 0) for source, _, n_bytes in batch.spans],
            [(slot, n_bytes, 0) for _, slot, n_bytes in batch.spans],
            batch.agent,
        )

    NixlWriter._write = blind
    settings = LinkSettings(kinds=KINDS, directory=pathlib.Path(sys.argv[1]), stall_s=60)
    me = "prefill-worker-n1"
    presence, writing = announce(me, settings), open_writing(me, settings)
    print(writing.agent.hex(), flush=True)
    endpoint = decode(bytes.fromhex(sys.stdin.readline()), LinkEndpoint)
    link = open_link(endpoint, writer=me, settings=settings, writing=writing)
    link.connect()
    print("connected", flush=True)
    refs = [SlotRef(slot=slot, generation=1) for slot in range(int(sys.stdin.readline()))]
    buffers = [link.buffer(ref) for ref in refs]
    for buffer in buffers:
        buffer[:] = b"L" * len(buffer)
    link.send(list(zip(refs, buffers)))
    link.confirm()
    print("written", flush=True)
    sys.stdin.readline()
    """
)


REF = SlotRef(slot=0, generation=1)


@pytest.fixture
def kind() -> str:
    return "nixl"


class Child:
    """A process of the other side."""

    def __init__(self, program: str, directory: Path, transports: str = "tcp") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UCX_TLS": transports},
        )

    def hears(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert ready, "the child says nothing"
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Freeze it, until none of its threads runs (on a busy machine they go on at first)."""
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:
            wait_until(lambda: set(self._states()) == {"T"})

    def _states(self) -> list[str]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return [task.read_text().rpartition(")")[2].split()[0] for task in tasks]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def far_reader(tmp_path: Path) -> Iterator[Child]:
    child = Child(READER_PROGRAM, tmp_path)
    yield child
    child.end()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[NixlWriting]:
    made = open_writing(WRITER, LinkSettings(kinds=KINDS, directory=tmp_path))
    assert made is not None
    yield made
    made.close()


def link_to(child: Child, shared: NixlWriting, *, stall_s: float = 0.4) -> NixlWriter:
    endpoint = decode(bytes.fromhex(child.hears()), LinkEndpoint)
    return NixlWriter(endpoint, shared, stall_s=stall_s)


def filled(link: NixlWriter, generation: int, byte: bytes) -> list[tuple[SlotRef, memoryview]]:
    blocks = []
    for slot in range(BLOCKS):
        ref = SlotRef(slot=slot, generation=generation)
        buffer = link.buffer(ref)
        buffer[:] = byte * BLOCK_BYTES
        blocks.append((ref, buffer))
    return blocks


def wait_until(fact: Any) -> None:
    give_up_s = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


@needs_nixl
@pytest.mark.parametrize("transports", ["tcp", "tcp,cma"])
def test_blocks_arrive(tmp_path: Path, shared: NixlWriting, transports: str) -> None:
    child = Child(READER_PROGRAM, tmp_path, transports)
    link = link_to(child, shared, stall_s=60)
    link.connect()

    blocks = filled(link, 1, b"A")
    link.send(blocks)
    link.confirm()

    child.say("what?")
    assert child.hears() == "A"
    for ref, buffer in blocks:
        buffer.release()
        link.stop(ref)
    link.send(filled(link, 2, b"B"))
    with pytest.raises(Refused, match="closed for generation 2"):
        link.confirm()
    child.say("what?")
    assert child.hears() == "A"
    child.end()


@needs_nixl
@pytest.mark.parametrize("looks", [True, False])
def test_what_a_frozen_reader_is_still_sent_is_what_was_given_and_never_the_next_requests(
    far_reader: Child, shared: NixlWriting, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """A released NIXL transfer read its source when it went on: 40 of 48 blocks leaked."""
    link = link_to(far_reader, shared)
    link.connect()
    if not looks:  # Else it hangs where it reads the gates, and nothing is written at all.
        monkeypatch.setattr(NixlWriter, "_look_at_gates", lambda *_: iter(()))
    blocks = filled(link, 1, b"A")
    far_reader.signal(signal.SIGSTOP)

    link.send(blocks)
    with pytest.raises(LinkBroken, match="its peer may be hung"):
        link.confirm()

    assert shared.plane.unfinished == 1
    for ref, buffer in blocks:
        assert link.is_sending(ref)
        buffer.release()
        link.stop(ref)
    with pytest.raises(LinkBroken, match="an earlier write has not ended"):
        link.connect()
    shared.sources.provide(BLOCK_BYTES, BLOCKS)
    for ref, buffer in filled(link, 2, b"B"):
        buffer.release()
        link.stop(ref)
    far_reader.signal(signal.SIGCONT)
    wait_until(lambda: shared.plane.unfinished == 0)
    far_reader.say("what?")
    assert far_reader.hears() == "A"
    assert not any(link.is_sending(ref) for ref, _ in blocks)


@needs_nixl
@pytest.mark.parametrize("frozen", [False, True])
def test_a_reader_that_is_killed_is_noticed_and_everything_is_let_go(
    far_reader: Child, shared: NixlWriting, frozen: bool
) -> None:
    link = link_to(far_reader, shared, stall_s=20)
    link.connect()
    blocks = filled(link, 1, b"A")
    if frozen:
        far_reader.signal(signal.SIGSTOP)
        link.send(blocks)
    far_reader.end()
    if not frozen:
        link.send(blocks)

    with pytest.raises(LinkBroken, match="gone"):
        link.confirm()

    wait_until(lambda: shared.plane.unfinished == 0)
    for ref, buffer in blocks:
        buffer.release()
        link.stop(ref)
    assert link.reader_is_gone()


@needs_nixl
def test_a_reader_that_is_dead_already_cannot_be_opened(
    far_reader: Child, shared: NixlWriting
) -> None:
    link = link_to(far_reader, shared)
    far_reader.end()
    with pytest.raises(LinkBroken):
        link.connect()


@needs_nixl
def test_a_late_write_finds_its_slots_in_quarantine_and_no_one_elses(
    reader: Any, tmp_path: Path
) -> None:
    """The writer looks at no gate: what it sent waits in sockets while its ticket ends."""
    child = Child(BLIND_WRITER_PROGRAM, tmp_path)
    reader.agents[WRITER] = bytes.fromhex(child.hears())
    ticket = reader.reserve("r1", tokens=12, prefill_worker=WRITER)
    assert ticket.slots == tuple(SlotRef(slot=slot, generation=1) for slot in range(3))
    child.say(encode(ticket.endpoint).hex())
    assert child.hears() == "connected"
    (target,) = (t for t in reader.incoming._held.targets if t.endpoint.kind == "nixl")
    held_up = threading.Event()
    target._plane.call(lambda _: held_up.wait(60))
    child.say("3")
    assert child.hears() == "posted"
    child.signal(signal.SIGSTOP)

    reader.incoming.writer_lost(WRITER)
    for now_s in (1.0, 2.0, 3.0):
        reader.incoming.sweep(now_s)
    assert reader.incoming.slots_quarantined == 3
    with pytest.raises(Refused, match="no_room"):
        reader.reserve("r2", tokens=4 * 8)
    others = reader.reserve("r3", tokens=4 * 5)
    reader.write(others, tokens=4 * 5) if held_up.set() is None else None
    child.signal(signal.SIGCONT)

    assert child.hears() == "written"
    assert {reader.memory(ref) for ref in ticket.slots} == {b"L" * 6000}
    assert all(b"L" not in reader.memory(ref) for ref in others.slots)
    reader.sweep_until_free(4.0, slots=5)
    again = reader.reserve("r4", tokens=12)
    blocks = reader.incoming.claim(
        reader.job(again, reader.write(again, tokens=12)), tokens=12, now_s=5.0
    )
    assert all(bytes(block.data[:4]) == b"r4.1" for block in blocks)
    child.end()


@needs_nixl
def test_a_frozen_writers_slots_wait_for_its_death(reader: Any, tmp_path: Path) -> None:
    child = Child(BLIND_WRITER_PROGRAM, tmp_path, "tcp,cma")
    reader.agents[WRITER] = bytes.fromhex(child.hears())
    reader.reserve("r1", tokens=12, prefill_worker=WRITER)
    child.signal(signal.SIGSTOP)

    reader.incoming.writer_lost(WRITER)
    for now_s in range(1, 30):
        reader.incoming.sweep(float(now_s))
        time.sleep(0.02)
    assert reader.incoming.slots_quarantined == 3

    child.end()
    reader.sweep_until_free(31.0)


@needs_nixl
def test_what_is_published_opens_nothing(reader: Any) -> None:
    told = next(e for e in reader.incoming.endpoints if e.kind == "nixl")

    assert told.address == reader.endpoint.address.split("/")[0]
    assert len(reader.endpoint.address) > 500
    with pytest.raises(Incompatible, match="expected a NIXL address"):
        NixlAddress.parse(told.address)


@needs_nixl
def test_a_writer_without_an_agent_gets_no_ticket(reader: Any) -> None:
    for agent in (b"\0", b"name", b"/metadata", b"n/" + bytes(70_000)):
        with pytest.raises(Refused, match="announced no NIXL agent"):
            reader.reserve("r1", agent=agent)
    assert reader.incoming.slots_used == 0


@needs_nixl
@pytest.mark.parametrize("metadata", ["00", "6e69786c", "ff" * 400])
def test_metadata_that_is_none_is_an_error_and_no_more(
    reader: Any, shared: NixlWriting, settings: LinkSettings, metadata: str
) -> None:
    good = reader.endpoint
    bad = "/".join([*good.address.split("/")[:-1], metadata])
    link = NixlWriter(msgspec.structs.replace(good, address=bad), shared, stall_s=1)
    with pytest.raises((LinkBroken, Incompatible)):
        link.connect()
    again = open_link(good, writer=WRITER, settings=settings, writing=shared)
    again.connect()
    assert again.is_ready


@needs_nixl
def test_memory_that_is_not_the_readers_cannot_be_named(reader: Any, shared: NixlWriting) -> None:
    where = NixlAddress.parse(reader.endpoint.address)
    moved = NixlAddress(where.agent, 1 << 40, where.stride_bytes, where.gates, where.metadata)
    endpoint = msgspec.structs.replace(reader.endpoint, address=str(moved))
    ticket: Ticket = reader.reserve("r1", tokens=4)
    link = NixlWriter(endpoint, shared, stall_s=5)
    link.connect()
    buffer = link.buffer(ticket.slots[0])
    link.send([(ticket.slots[0], buffer)])
    with pytest.raises(LinkBroken, match="nixlNotFoundError"):
        link.confirm()


@needs_nixl
def test_beyond_this_machine_it_must_be_asked_for(
    reader: Any, shared: NixlWriting, settings: LinkSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = msgspec.structs.replace(reader.endpoint, host="")
    with pytest.raises(Incompatible, match="over a network, in the clear"):
        open_link(far, writer=WRITER, settings=settings, writing=shared)
    elsewhere = msgspec.structs.replace(reader.endpoint, host="another")
    with pytest.raises(Incompatible, match="reached on another only"):
        open_link(elsewhere, writer=WRITER, settings=settings, writing=shared)
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    with pytest.raises(Permanent, match="UCX_NET_DEVICES=eth0 leaves this machine"):
        open_writing(WRITER, settings)


def test_where_there_is_none_it_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_library, "MODULES", ("nixl_that_is_not_here",))
    settings = LinkSettings(kinds=KINDS, directory=tmp_path)

    assert offered(settings) == ("shm", "tcp")
    links = WriterLinks(WRITER, settings=settings)
    assert links.agent == b""
    links.close()
    alone = LinkSettings(kinds=("nixl",), directory=tmp_path)
    with pytest.raises(Permanent, match="nixl_that_is_not_here is installed"):
        open_targets(alone, name="d1", shape=PoolShape(1, 1), guard=None)  # type: ignore[arg-type]


def test_an_isolated_network_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_library, "MODULES", ("json",))
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert "UCX_TLS and UCX_NET_DEVICES must" in nixl_library.why_not_offered("isolated")
    monkeypatch.setenv("UCX_TLS", "rc,tcp,cuda_copy")
    assert "UCX_NET_DEVICES must" in nixl_library.why_not_offered("isolated")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert nixl_library.why_not_offered("isolated") == ""


def test_notes_say_what_they_said() -> None:
    refs = (SlotRef(slot=3, generation=7), SlotRef(slot=0, generation=1 << 40))
    for note in (
        Ask(b"12345678", refs, "a/1/2/3/ff"),
        Ask(b"12345678", (), "a"),
        Stopped(b"8" * 8, refs),
    ):
        assert unpack(note.pack()) == note
        for cut in range(len(note.pack())):
            assert unpack(note.pack()[:cut]) is None
    assert unpack(b"DKV\0" + bytes(14)) is None
    assert unpack(Ask(b"8" * 8, (), "a").pack()[:-1] + b"\xff") is None


def test_blocks_that_adjoin_on_both_sides_are_one_write() -> None:
    memory = memoryview(bytearray(8192))
    one, two, other = Source(memory, 0, 0), Source(memory, 8192, 0), Source(memory, 16384, 16384)

    def spans(*blocks: tuple[Source, int, int]) -> list[tuple[int, int, int]]:
        return joined((Given(source, REF, slot_at), size) for source, slot_at, size in blocks)

    assert spans((one, 800_000, 8192), (two, 808_192, 100)) == [(0, 800_000, 8292)]
    assert spans((one, 800_000, 8000), (two, 808_192, 100)) == [
        (0, 800_000, 8000),
        (8192, 808_192, 100),
    ]
    assert len(spans((one, 800_000, 8192), (two, 900_000, 100))) == 2
    assert len(spans((two, 800_000, 8192), (other, 808_192, 8192))) == 2
    assert spans() == []


def test_an_address_is_read_as_it_was_written() -> None:
    where = NixlAddress("decode-worker-1.ab", 4096, 8192, 77, b"meta")
    assert NixlAddress.parse(str(where)) == where
    endpoint = LinkEndpoint(kind="tcp", host="", address="a/b", slots=1, slot_bytes=1)
    assert published(endpoint) is endpoint
    for bad in ("", "a", "a/1/2/3/", "a/0/2/3/ff", "a/-1/2/3/ff", "\n/1/2/3/ff", "a/1/2/3/zz"):
        with pytest.raises(Incompatible):
            NixlAddress.parse(bad)
