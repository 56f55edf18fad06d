"""What TLS costs a hand-off over tcp: `python bench/kv_tls.py` (half a minute; needs no weights).

Two processes on this machine, loopback, the links as they ship: a reader with open slots, a writer
that sends batches of blocks under one ticket and waits for the answer. Plain and TLS take turns in
one run, so that a noisy machine disturbs them alike. Beside them what a bare socket does with the
same bytes. Not in it: checksums, and the engine's export and import, which every link has.

    moved       GB/s, from the first byte sent to the last answer
    CPU         seconds per GB, both processes
    small       one block of 16 KiB, sent and answered: the floor of a hand-off over this link
    connected   connect, shake hands, greet: once per pair of workers
"""

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from linking.child import Child, child
from linking.figures import hardware, own_cpu_s, spread

from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_contracts.wire import decode, encode
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.pool_file import PoolShape, private_slots
from diptych_kvlink.sealing import TicketOffice
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_listening import Listening
from diptych_kvlink.tcp_receiving import Guard
from diptych_kvlink.tcp_target import TcpTarget
from diptych_kvlink.tcp_writer import TcpWriter
from diptych_testkit.builders import a_generation

WRITER = Incarnation("prefill-worker-1")
SHAPE = PoolShape(slots=8, slot_bytes=1_474_560)
"""64 tokens of a 135M model; a batch is 11.8 MB, a prompt of 512 tokens."""
SMALL_BYTES = 16_384
STALL_S = 30.0


@dataclass
class Column:
    """One way's runs."""

    moved_gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    small_us: list[float] = field(default_factory=list)
    connected_ms: list[float] = field(default_factory=list)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=9)
    options.add_argument("--batches", type=int, default=60, help="of 11.8 MB, per run and way")
    options.add_argument("--reader", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.reader is not None:
        read(json.loads(chosen.reader))
        return
    columns = {way: Column() for way in ("bare socket", "tcp plain", "tcp TLS")}
    for _ in range(chosen.runs):
        for way, column in columns.items():
            measure(way, column, chosen.batches)
    print(f"{hardware()}; {chosen.runs} runs of {chosen.batches} batches of ", end="")
    print(f"{SHAPE.slots} x {SHAPE.slot_bytes / 1e6:.2f} MB; median (min to max)")
    for line in table(columns):
        print(line)


def measure(way: str, column: Column, batches: int) -> None:
    identity = LinkIdentity()
    closing: list[Callable[[], None]] = []
    asked = {"way": way, "certificate": identity.certificate.hex()}
    with child(__file__, asked) as reader:
        send, confirm, connect = wired(way, reader, identity, closing)
        began_s = time.perf_counter()
        connect()
        column.connected_ms.append((time.perf_counter() - began_s) * 1000)
        blocks = [bytes([slot + 1]) * SHAPE.slot_bytes for slot in range(SHAPE.slots)]
        for _ in range(3):
            send(blocks)
            confirm()
        cpu_s, began_s = reader.ask("cpu") + own_cpu_s(), time.perf_counter()
        for _ in range(batches):
            send(blocks)
            confirm()
        took_s = time.perf_counter() - began_s
        gigabytes = batches * SHAPE.slots * SHAPE.slot_bytes / 1e9
        column.moved_gb_per_s.append(gigabytes / took_s)
        column.cpu_s_per_gb.append((reader.ask("cpu") + own_cpu_s() - cpu_s) / gigabytes)
        column.small_us.append(statistics.median(small(send, confirm) for _ in range(200)))
        for close in closing:
            close()


def small(send, confirm) -> float:
    began_s = time.perf_counter()
    send([bytes(SMALL_BYTES)])
    confirm()
    return (time.perf_counter() - began_s) * 1e6


def wired(way: str, reader: Child, identity: LinkIdentity, closing: list[Callable[[], None]]):
    """How blocks are sent, confirmed, and the connection made."""
    if way == "bare socket":
        sock = socket.socket()
        closing.append(sock.close)

        def send_bare(blocks: list[bytes]) -> None:
            sock.sendall(sum(map(len, blocks)).to_bytes(8, "little"))
            for block in blocks:
                sock.sendall(block)

        def connect_bare() -> None:
            sock.connect(("127.0.0.1", int(reader.told[0])))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        return send_bare, lambda: sock.recv(1), connect_bare
    endpoint, seal = (bytes.fromhex(part) for part in reader.told)
    link = TcpWriter(decode(endpoint, LinkEndpoint), WRITER, stall_s=STALL_S, identity=identity)
    closing.append(link.close)

    def send(blocks: list[bytes]) -> None:
        refs = (SlotRef(slot=slot, generation=1) for slot in range(len(blocks)))
        link.send([(ref, memoryview(b)) for ref, b in zip(refs, blocks, strict=True)], seal)

    return send, link.confirm, link.connect


def read(asked: dict[str, str]) -> None:
    """As the reader, until the writer's pipe ends; tells its CPU seconds for every line."""
    if asked["way"] == "bare socket":
        read_bare()
    else:
        read_link(asked["way"] == "tcp TLS", bytes.fromhex(asked["certificate"]))
    for _ in sys.stdin:
        print(own_cpu_s(), flush=True)
    os._exit(0)


def read_bare() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps([listener.getsockname()[1]]), flush=True)

    def serve() -> None:
        sock, room = listener.accept()[0], memoryview(bytearray(SHAPE.slots * SHAPE.slot_bytes))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := sock.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left:
                left -= sock.recv_into(room[:left])
            sock.sendall(b"k")

    threading.Thread(target=serve, daemon=True).start()


def read_link(tls: bool, certificate: bytes) -> None:
    guard = Guard(TicketOffice(time.monotonic), Tally())
    target = TcpTarget(
        "decode-worker-1",
        private_slots(SHAPE),
        slot_bytes=SHAPE.slot_bytes,
        listening=Listening("127.0.0.1", 0, STALL_S, "here", tls),
        guard=guard,
    )
    target.expect(WRITER, certificate)
    generation, end_s = a_generation("r1"), time.monotonic() + 600
    for slot in range(SHAPE.slots):
        target.admit(slot, 1, WRITER, f"{generation.request_id}.{generation.attempt}")
    seal = guard.office.seal(generation, WRITER, slots=b"", deadline_s=end_s)
    print(json.dumps([encode(target.endpoint).hex(), encode(seal).hex()]), flush=True)


def table(columns: dict[str, Column]) -> Iterator[str]:
    titles = ("moved, GB/s", "CPU, s/GB", "small, us", "connected, ms")
    yield f"{'':12}" + "".join(f"{title:>24}" for title in titles)
    for way, column in columns.items():
        cells = (
            spread(column.moved_gb_per_s, 2),
            spread(column.cpu_s_per_gb, 2),
            spread(column.small_us, 0),
            spread(column.connected_ms, 1),
        )
        yield f"{way:12}" + "".join(f"{cell:>24}" for cell in cells)


if __name__ == "__main__":
    main()
