"""A real writer process and a real reader, over every link."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych_contracts.errors import LinkBroken
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import BlockDigest
from diptych_contracts.transfers import LinkEndpoint, SlotRef, Ticket
from diptych_contracts.wire import decode, encode
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.lockfile import sweep_leftovers
from diptych_kvlink.tcp_writer import TcpWriter

WRITER = Incarnation("prefill-worker-a1")

WRITER_PROGRAM = textwrap.dedent(
    """
    import asyncio, json, pathlib, sys, time
    from diptych_contracts.transfers import Ticket
    from diptych_contracts.wire import decode, encode
    from diptych_kvlink.links import KINDS, LinkSettings
    from diptych_kvlink.tcp_wire import pack_batch
    from diptych_kvlink.writer_links import WriterLinks

    settings = LinkSettings(kinds=KINDS, directory=pathlib.Path(sys.argv[2]), stall_s=60)
    links = WriterLinks(sys.argv[1], settings=settings)
    SALT = int(sys.argv[3])
    print("ready", flush=True)
    print(links.certificate.hex(), links.agent.hex(), sep="/", flush=True)

    async def serve(hexed):
        ticket = decode(bytes.fromhex(hexed), Ticket)
        transfer = await links.transfer(ticket, sent_s=time.monotonic(), salt=SALT)
        for index in range(transfer.blocks):
            data = bytes([index + 1]) * 6000
            transfer.buffer(index)[:] = data
            transfer.written(index, len(data))
        digests = await transfer.digests(5.0)
        transfer.close()
        return [[d.index, d.n_bytes, d.checksum] for d in digests]

    for line in sys.stdin:
        if line.startswith("half "):
            ticket = decode(bytes.fromhex(line[5:]), Ticket)
            link = links.open(ticket.endpoint)
            link.connect()
            head = pack_batch(1, [(ticket.slots[0], 6000)], encode(ticket.seal))
            link._stream.send_all([head, bytes(3000)])
            print(3000, flush=True)
        elif line.startswith("hold "):
            ticket = decode(bytes.fromhex(line[5:]), Ticket)
            held = asyncio.run(links.transfer(ticket, sent_s=time.monotonic(), salt=SALT))
            print(len(held.buffer(0)), flush=True)
        else:
            print(json.dumps(asyncio.run(serve(line))), flush=True)
    links.close()
    """
)

READER_PROGRAM = textwrap.dedent(
    """
    import pathlib, sys, time
    from diptych_contracts.wire import encode
    from diptych_kvlink.links import LinkSettings, open_targets
    from diptych_kvlink.pool_file import PoolShape
    from diptych_kvlink.sealing import TicketOffice
    from diptych_kvlink.tallying import Tally
    from diptych_kvlink.tcp_receiving import Guard
    from diptych_testkit.builders import a_generation

    settings = LinkSettings(kinds=("tcp",), directory=pathlib.Path(sys.argv[1]))
    guard, me = Guard(TicketOffice(time.monotonic), Tally()), "prefill-worker-a1"
    shape = PoolShape(40, 1_000_000)
    (target,) = open_targets(settings, name="decode-worker-1", shape=shape, guard=guard)
    target.expect(me, bytes.fromhex(sys.argv[2]))
    for slot in range(40):
        target.admit(slot, 1, me, "r1.1")
    end_s = time.monotonic() + 600
    seal = guard.office.seal(a_generation("r1"), me, slots=b"", deadline_s=end_s)
    print("ready", flush=True)
    print(encode(target.endpoint).hex(), flush=True)
    print(encode(seal).hex(), flush=True)
    time.sleep(600)
    """
)

POOL_PROGRAM = textwrap.dedent(
    """
    import pathlib, sys, time
    from diptych_kvlink.pool_file import PoolShape
    from diptych_kvlink.shm import ShmPool

    ShmPool("decode-worker-doomed", PoolShape(2, 6000), pathlib.Path(sys.argv[1]))
    print("ready", flush=True)
    time.sleep(600)
    """
)


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def stop(child: subprocess.Popen[str]) -> None:
    with child:
        child.kill()


@pytest.fixture
def writer(tmp_path: Path, reader: Any) -> Iterator[subprocess.Popen[str]]:
    child = start(WRITER_PROGRAM, WRITER, tmp_path, reader.salt)
    assert child.stdout is not None
    certificate, agent = (bytes.fromhex(part) for part in child.stdout.readline().split("/"))
    reader.certificates[WRITER], reader.agents[WRITER] = certificate, agent
    yield child
    stop(child)


def ask(writer: subprocess.Popen[str], line: str) -> Any:
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write(line + "\n")
    writer.stdin.flush()
    return json.loads(writer.stdout.readline())


def send(writer: subprocess.Popen[str], ticket: Ticket) -> tuple[BlockDigest, ...]:
    return tuple(
        BlockDigest(index=index, n_bytes=n_bytes, checksum=checksum)
        for index, n_bytes, checksum in ask(writer, encode(ticket).hex())
    )


def test_blocks_cross_from_one_process_to_another(
    reader: Any, writer: subprocess.Popen[str]
) -> None:
    for request in ("r1", "r2", "r3", "r4"):
        ticket = reader.reserve(request, tokens=12)

        job = reader.job(ticket, send(writer, ticket))

        blocks = reader.incoming.claim(job, tokens=12, now_s=1.0)
        assert [bytes(block.data) for block in blocks] == [bytes([i]) * 6000 for i in (1, 2, 3)]
        reader.incoming.release(ticket.transfer_id)
    assert reader.incoming.slots_used == 0


@pytest.mark.parametrize("kind", ["shm"])
def test_a_frozen_writer_keeps_its_slots_in_quarantine_and_a_killed_one_does_not(
    reader: Any, writer: subprocess.Popen[str]
) -> None:
    ticket = reader.reserve("r1", tokens=12)
    assert ask(writer, "hold " + encode(ticket).hex()) == 6000
    os.kill(writer.pid, signal.SIGSTOP)

    reader.incoming.writer_lost(WRITER)
    for now_s in (1.0, 2.0, 3.0):
        reader.incoming.sweep(now_s)
    assert reader.incoming.slots_quarantined == 3

    writer.kill()
    writer.wait(timeout=60)
    reader.incoming.sweep(4.0)
    assert reader.incoming.slots_used == 0


@pytest.mark.parametrize("kind", ["shm"])
def test_a_writer_that_leaves_properly_is_seen_to_be_gone(
    reader: Any, writer: subprocess.Popen[str]
) -> None:
    ticket = reader.reserve("r1", tokens=12)
    assert writer.stdin is not None

    writer.stdin.close()
    writer.wait(timeout=60)

    assert reader.incoming.sweep(1.0) == [ticket.transfer_id]
    assert reader.incoming.slots_used == 0


@pytest.mark.parametrize("kind", ["tcp"])
@pytest.mark.parametrize(("end", "stall_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 3.0)])
def test_a_tcp_writer_killed_or_frozen_in_mid_block_frees_its_slots_and_harms_nobody(
    reader: Any, writer: subprocess.Popen[str], end: signal.Signals
) -> None:
    ticket, other = reader.reserve("r1", tokens=12), reader.reserve("r2", tokens=12)
    assert ask(writer, "half " + encode(ticket).hex()) == 3000
    began_s = time.monotonic()
    os.kill(writer.pid, end)

    ended: set[str] = set()
    while ended != {ticket.transfer_id, other.transfer_id}:
        ended |= set(reader.incoming.sweep(1.0))
        assert time.monotonic() - began_s < 60, ended
    assert reader.incoming.slots_used == 0
    again = reader.reserve("r3", tokens=10, prefill_worker=Incarnation("prefill-worker-b2"))
    reader.writer = Incarnation("prefill-worker-b2")
    digests = reader.write(again)
    if end is signal.SIGSTOP:
        os.kill(writer.pid, signal.SIGCONT)
    job = reader.job(again, digests, prefill_worker=reader.writer)
    assert len(reader.incoming.claim(job, tokens=10, now_s=2.0)) == 3


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_tcp_reader_killed_or_frozen_fails_the_transfer_in_time(
    tmp_path: Path, end: signal.Signals, when: str
) -> None:
    identity = LinkIdentity()
    child = start(READER_PROGRAM, tmp_path, identity.certificate.hex())
    assert child.stdout is not None
    endpoint = decode(bytes.fromhex(child.stdout.readline()), LinkEndpoint)
    seal = bytes.fromhex(child.stdout.readline())
    patience_s = 60.0 if end is signal.SIGKILL else 3.0
    link = TcpWriter(endpoint, WRITER, stall_s=patience_s, identity=identity)
    block = memoryview(bytes(1_000_000))
    blocks = [(SlotRef(slot=slot, generation=1), block) for slot in range(40)]
    link.send(blocks, seal)
    link.confirm()
    killing = threading.Timer(0.0 if when == "before" else 0.05, os.kill, (child.pid, end))
    killing.start()
    if when == "before":
        killing.join()

    with pytest.raises(LinkBroken):
        send_for_ever(link, blocks, seal)

    killing.join()
    stop(child)
    link.close()


def send_for_ever(link: TcpWriter, blocks: list[tuple[SlotRef, memoryview]], seal: bytes) -> None:
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        link.send(blocks, seal)
        link.confirm()


def test_what_a_killed_worker_leaves_is_swept(tmp_path: Path) -> None:
    child = start(POOL_PROGRAM, tmp_path)
    assert sweep_leftovers(tmp_path) == []

    stop(child)

    assert sweep_leftovers(tmp_path) == ["diptych-kv-decode-worker-doomed"]
    assert list(tmp_path.iterdir()) == []
