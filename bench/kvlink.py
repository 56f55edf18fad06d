"""KV links beside what they are made of: memcpy, plain shared memory, a plain socket.

    python bench/kvlink.py [--rounds 5] [--most-mb 256] [--seconds 0.3] [--only 65536x128]

Two processes on this machine; the links as they ship, opened by `kvlink.links`. All ways of a row
take turns in one run, so that a noisy machine disturbs them alike; the figure is the median of the
rounds, behind it least and most. NIXL's row is missing where it is not installed (make nixl).

    GB/s      from the first byte moved until the last is known to have arrived
    checked   the same with xxh3: by the writer while it sends, by the reader when all is there
    CPU       seconds per GB, both processes, unchecked
    latency   one block of that size, moved and confirmed, ms
"""

import argparse
import json
import mmap
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_contracts.wire import decode, encode
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.links import KINDS, LinkSettings, offered, open_link, open_targets, open_writing
from diptych_kvlink.pool_file import PoolShape, private_slots
from diptych_kvlink.sealing import TicketOffice
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_receiving import Guard
from diptych_kvlink.verifying import checksum
from diptych_testkit.builders import a_generation

WRITER = Incarnation("prefill-worker-1")
SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
COUNTS = (1, 16, 128, 1024)
BATCH_BLOCKS, BATCH_BYTES = 256, 16_000_000
"""As `kvlink.outgoing` sends."""
STALL_S, SALT = 30.0, 7
GOALS = {
    "shm": ("memcpy", 0.80, 0.60),
    "nixl": ("memcpy", 0.75, 0.60),
    "tcp": ("socket", 0.90, None),
    "tcp TLS": ("socket", 0.60, None),
}
"""Of whom, which part at least: unchecked, checked. For 8 MiB and more in blocks of >= 64 KiB."""
MOST_LATENCY_MS, LEAST_AEAD_GB_PER_S = 0.5, 1.0

Move = Callable[[bool], None]


@dataclass
class Cell:
    """One way's rounds."""

    gb_per_s: list[float] = field(default_factory=list)
    checked: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--most-mb", type=int, default=256, help="of one transfer")
    options.add_argument("--seconds", type=float, default=0.3, help="per round, way and row")
    options.add_argument("--only", help="one row: BYTESxBLOCKS")
    options.add_argument("--reader", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.reader:
        read(json.loads(chosen.reader))
        return
    print(f"{hardware()}; medians of {chosen.rounds} rounds (least to most)")
    verdicts: list[str] = []
    for size, count in rows(chosen.only, chosen.most_mb):
        cells = measure(size, count, rounds=chosen.rounds, seconds=chosen.seconds)
        print(f"\n{size >> 10} KiB x {count}")
        print(f"  {'':12}{'GB/s':>24}{'checked':>24}{'CPU, s/GB':>20}{'latency, ms':>22}")
        for way, cell in cells.items():
            print(
                f"  {way:12}{spread(cell.gb_per_s):>24}{spread(cell.checked):>24}"
                f"{spread(cell.cpu_s_per_gb):>20}{spread(cell.latency_ms, 3):>22}",
                flush=True,
            )
        verdicts += judged(size, count, cells)
    verdicts += aead(chosen.rounds)
    print("\ngoals")
    for verdict in verdicts:
        print(f"  {verdict}")


def rows(only: str | None, most_mb: int) -> Iterator[tuple[int, int]]:
    if only:
        size, _, count = only.partition("x")
        yield int(size), int(count)
        return
    for size in SIZES:
        for count in COUNTS:
            if size * count <= most_mb << 20:
                yield size, count


def measure(size: int, count: int, *, rounds: int, seconds: float) -> dict[str, Cell]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="diptych-bench-") as folder:
        identity = LinkIdentity()
        kinds = offered(LinkSettings(kinds=KINDS))
        settings = LinkSettings(kinds=kinds, directory=Path(folder), stall_s=STALL_S)
        writing = open_writing(WRITER, settings)
        asked = {
            "size": size,
            "count": count,
            "folder": folder,
            "kinds": kinds,
            "certificate": identity.certificate.hex(),
            "agent": writing.agent.hex() if writing else "",
        }
        with reading(asked) as reader:
            ways = Ways(reader, size, count, settings, identity, writing)
            cells = {way: Cell() for way in ways.moves}
            for move in ways.moves.values():
                move(False)
            for _ in range(rounds):
                for way, move in ways.moves.items():
                    measure_one(cells[way], move, reader, size * count, seconds)
            ways.close()
        if writing is not None:
            writing.close()
        return cells


def measure_one(cell: Cell, move: Move, reader: "Reader", n_bytes: int, seconds: float) -> None:
    cpu_s, began_s = own_cpu_s() + reader.ask("cpu"), time.perf_counter()
    times = repeated(lambda: move(False), seconds)
    took_s = time.perf_counter() - began_s
    gigabytes = len(times) * n_bytes / 1e9
    cell.cpu_s_per_gb.append((own_cpu_s() + reader.ask("cpu") - cpu_s) / gigabytes)
    cell.gb_per_s.append(gigabytes / took_s)
    cell.latency_ms.append(statistics.median(times) * 1000)
    checked = repeated(lambda: move(True), seconds)
    cell.checked.append(len(checked) * n_bytes / 1e9 / sum(checked))


def repeated(move: Callable[[], None], seconds: float) -> list[float]:
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        move()
        times.append(time.perf_counter() - began_s)
    return times


class Ways:
    """How the same blocks are moved, by each way."""

    def __init__(self, reader, size, count, settings, identity, writing) -> None:
        self._reader, self._size, self._count = reader, size, count
        shape = PoolShape(slots=count, slot_bytes=size)
        self._blocks = private_slots(shape)
        for number, block in enumerate(self._blocks):
            block[:] = bytes([number % 251 + 1]) * size
        self._refs = [SlotRef(slot=slot, generation=1) for slot in range(count)]
        self._closing: list[Callable[[], None]] = []
        self.moves: dict[str, Move] = {}
        self._add_plain(shape)
        for name, (endpoint, seal) in reader.told["links"].items():
            endpoint, seal = decode(bytes.fromhex(endpoint), LinkEndpoint), bytes.fromhex(seal)
            where = settings if endpoint.certificate or name != "tcp" else plain(settings)
            link = open_link(
                endpoint, writer=WRITER, settings=where, identity=identity, writing=writing
            )
            link.connect()
            self._closing.append(link.close)
            self.moves[name] = self._over_shm(link) if name == "shm" else self._over(link, seal)

    def close(self) -> None:
        for close in self._closing:
            close()

    def _add_plain(self, shape: PoolShape) -> None:
        inside = private_slots(shape)

        def memcpy(checked: bool) -> None:
            self._copy(inside)
            if checked:
                self._seal(self._blocks)
                self._seal(inside)

        self.moves["memcpy"] = memcpy
        self.moves["shared mem"] = self._plain_memory(shape)
        self.moves["socket"] = self._plain_socket()

    def _plain_memory(self, shape: PoolShape) -> Move:
        with open(self._reader.told["plain"], "r+b") as file:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            whole = memoryview(mmap.mmap(file.fileno(), shape.total_bytes, flags=flags))
        starts = range(0, self._count * shape.stride_bytes, shape.stride_bytes)
        outside = [whole[at : at + self._size] for at in starts]

        def move(checked: bool) -> None:
            self._copy(outside)
            if checked:
                self._seal(outside)
            self._reader.ask("verify plain" if checked else "ready")

        return move

    def _plain_socket(self) -> Move:
        sock = socket.create_connection(("127.0.0.1", self._reader.told["port"]))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._closing.append(sock.close)

        def move(checked: bool) -> None:
            for block in self._blocks:
                sock.sendall(block)
            if checked:
                self._seal(self._blocks)
            sock.recv(1)
            if checked:
                self._reader.ask("verify socket")

        return move

    def _copy(self, slots: list[memoryview]) -> None:
        for slot, block in zip(slots, self._blocks, strict=True):
            slot[:] = block

    def _over_shm(self, link) -> Move:
        buffers = [link.buffer(ref) for ref in self._refs]
        pairs = list(zip(self._refs, buffers, strict=True))

        def move(checked: bool) -> None:
            for (_, buffer), block in zip(pairs, self._blocks, strict=True):
                buffer[:] = block
            link.send(pairs)
            if checked:
                self._seal(buffers)
            link.confirm()
            if checked:
                self._reader.ask("verify links")

        return move

    def _over(self, link, seal: bytes) -> Move:
        buffers = [link.buffer(ref) for ref in self._refs]
        for buffer, block in zip(buffers, self._blocks, strict=True):
            buffer[:] = block
        pairs = [
            (ref, buffer.toreadonly()) for ref, buffer in zip(self._refs, buffers, strict=True)
        ]
        step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // self._size))
        batches = [pairs[at : at + step] for at in range(0, len(pairs), step)]

        def move(checked: bool) -> None:
            for batch in batches:
                link.send(batch, seal)
                if checked:
                    self._seal([data for _, data in batch])
                link.confirm()
            if checked:
                self._reader.ask("verify links")

        return move

    def _seal(self, blocks) -> None:
        for block in blocks:
            checksum(block, SALT)


def plain(settings: LinkSettings) -> LinkSettings:
    return LinkSettings(
        kinds=settings.kinds, directory=settings.directory, stall_s=STALL_S, tls=False
    )


class Reader:
    """The other process."""

    def __init__(self, child: subprocess.Popen) -> None:
        self._child = child
        self.told = json.loads(child.stdout.readline())

    def ask(self, what: str) -> float:
        self._child.stdin.write(what + "\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())


@contextmanager
def reading(asked: dict) -> Iterator[Reader]:
    command = [sys.executable, __file__, "--reader", json.dumps(asked)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            yield Reader(child)
        finally:
            child.stdin.close()


def read(asked: dict) -> None:
    """As the reader, until the writer's pipe ends."""
    shape = PoolShape(slots=asked["count"], slot_bytes=asked["size"])
    guard = Guard(TicketOffice(time.monotonic), Tally())
    links, views = {}, []
    for tls in (True, False):
        kinds = tuple(asked["kinds"]) if tls else ("tcp",)
        settings = LinkSettings(
            kinds=kinds, directory=Path(asked["folder"]), stall_s=STALL_S, tls=tls
        )
        targets = open_targets(settings, name=f"decode-{tls:d}", shape=shape, guard=guard)
        seal = granted(targets, guard, asked)
        for target in targets:
            name = "tcp TLS" if target.endpoint.certificate else target.endpoint.kind
            links[name] = (encode(target.endpoint).hex(), seal.hex())
        views = views or [targets[0].view(slot, shape.slot_bytes) for slot in range(shape.slots)]
    plain_file, outside = plain_memory(asked["folder"], shape)
    port, received = plain_listener(shape)
    names = [name for name in ("shm", "nixl", "tcp", "tcp TLS") if name in links]
    told = {"links": {name: links[name] for name in names}, "plain": plain_file, "port": port}
    print(json.dumps(told), flush=True)
    memories = {"links": views, "plain": outside, "socket": received}
    for line in sys.stdin:
        order, _, which = line.strip().partition(" ")
        if order == "verify":
            for block in memories[which]:
                checksum(block, SALT)
        print(own_cpu_s() if order == "cpu" else 0, flush=True)
    os._exit(0)


def granted(targets, guard: Guard, asked: dict) -> bytes:
    """Every slot open to the writer, under one ticket."""
    generation = a_generation("r1")
    certificate, agent = bytes.fromhex(asked["certificate"]), bytes.fromhex(asked["agent"])
    for target in targets:
        target.expect(WRITER, certificate, agent)
        for slot in range(asked["count"]):
            target.admit(slot, 1, WRITER, f"{generation.request_id}.{generation.attempt}")
    end_s = time.monotonic() + 3600
    return encode(guard.office.seal(generation, WRITER, slots=b"", deadline_s=end_s))


def plain_memory(folder: str, shape: PoolShape) -> tuple[str, list[memoryview]]:
    path = Path(folder, "plain")
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, shape.total_bytes)
        whole = memoryview(mmap.mmap(file.fileno(), shape.total_bytes))
    starts = range(0, shape.slots * shape.stride_bytes, shape.stride_bytes)
    return str(path), [whole[at : at + shape.slot_bytes] for at in starts]


def plain_listener(shape: PoolShape) -> tuple[int, list[memoryview]]:
    listener = socket.create_server(("127.0.0.1", 0))
    slots = private_slots(shape)

    def serve() -> None:
        sock = listener.accept()[0]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            for slot in slots:
                at = 0
                while at < len(slot):
                    got = sock.recv_into(slot[at:])
                    if not got:
                        return
                    at += got
            sock.sendall(b"k")

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1], slots


def judged(size: int, count: int, cells: dict[str, Cell]) -> Iterator[str]:
    if size * count >= 8 << 20 and size >= 64 << 10:
        for way, (whom, plain_frac, checked_frac) in GOALS.items():
            if way in cells:
                row, whole = f"{size >> 10} KiB x {count}", statistics.median(cells[whom].gb_per_s)
                seen = statistics.median(cells[way].gb_per_s) / whole
                yield verdict(f"{row}: {way} of {whom}", seen, plain_frac)
                if checked_frac is not None:
                    seen = statistics.median(cells[way].checked) / whole
                    yield verdict(f"{row}: {way} checked, of {whom}", seen, checked_frac)
    if size == SIZES[0] and count == 1:
        for way in GOALS:
            if way in cells:
                seen_ms = statistics.median(cells[way].latency_ms)
                fine = seen_ms <= MOST_LATENCY_MS
                said = "pass" if fine else "FALLS SHORT"
                yield f"{said:12} one block of 16 KiB by {way}: {seen_ms:.3f} ms, goal 0.5"


def verdict(what: str, seen: float, goal: float) -> str:
    return f"{'pass' if seen >= goal else 'FALLS SHORT':12} {what}: {seen:.0%}, goal {goal:.0%}"


def aead(rounds: int) -> Iterator[str]:
    """AES-256-GCM over 1 MiB, by CPU seconds: GB/s of one core."""
    sealing, block, found = AESGCM(AESGCM.generate_key(256)), bytes(1 << 20), []
    for number in range(rounds):
        began_s = time.thread_time()
        for index in range(64):
            sealing.encrypt((number << 16 | index).to_bytes(12, "big"), block, None)
        found.append(64 * len(block) / 1e9 / (time.thread_time() - began_s))
    fine = statistics.median(found) >= LEAST_AEAD_GB_PER_S
    said = "pass" if fine else "FALLS SHORT"
    yield f"{said:12} AES-256-GCM: {spread(found)} GB/s per core, goal 1"


def spread(values: list[float], digits: int = 2) -> str:
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}; load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
