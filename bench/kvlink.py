"""KV links beside what they are made of: memcpy, plain shared memory, a plain socket.

    python bench/kvlink.py [--rounds 5] [--most-mb 256] [--seconds 0.3] [--warm]
        [--goals | --only 65536x128]

Two processes on this machine; the links as they ship, opened by `kvlink.links`. All ways of a row
take turns in one run, so that a noisy machine disturbs them alike; the figure is the median of the
rounds, behind it least and most. NIXL's row is missing where it is not installed (make nixl).

    GB/s      from the first byte moved until the last is known to have arrived: of the round's
              median transfer
    checked   the same with xxh3: the writer hashes while it sends, the reader when all is there
    CPU       seconds per GB, both processes, unchecked
    latency   one transfer of all the row's blocks, moved and confirmed, ms

memcpy is one copy within one process, block by block as every other way, between two pools of
ordinary pages that were all touched before; `memcpy 2M` is the same into pages of 2 MiB, which the
links' slots lie on. Goals are shares of memcpy, or of the socket, unchecked. Each transfer takes
other blocks and other slots than the last one, out of 128 MiB and more, by every way: KV that is
handed over lies in memory, not in a cache (`--warm`: always the same). A reader's time is the time
it hashes for: how it hears that all is there (the bus) belongs to no link. The plain ways hear of
it through a pipe, which is in their figures.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from linking.child import Child, child
from linking.figures import hardware, own_cpu_s, spread
from linking.reader import STALL_S, WITH_TLS, WRITER, read
from linking.ways import Room, Way, Ways, Writer

from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.links import KINDS, LinkSettings, offered, open_writing

SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
COUNTS = (1, 16, 128, 1024)
ROTATED_BYTES, MOST_WINDOWS = 128 << 20, 256
GOALS = {
    "shm": ("memcpy", 0.80, 0.60),
    "nixl": ("memcpy", 0.75, 0.60),
    "tcp": ("socket", 0.90, None),
    WITH_TLS: ("socket", 0.60, None),
}
"""Of whom, which part at least: unchecked, checked. For 8 MiB and more in blocks of >= 64 KiB."""
MOST_LATENCY_MS, LEAST_AEAD_GB_PER_S = 0.5, 1.0


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
    options.add_argument("--goals", action="store_true", help="only the rows that have goals")
    options.add_argument("--warm", action="store_true", help="always the same blocks")
    options.add_argument("--reader", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.reader:
        read(json.loads(chosen.reader))
        return
    how = "from cache where it fits" if chosen.warm else "from memory"
    print(f"{hardware()}; {how}; medians of {chosen.rounds} rounds (least to most)")
    verdicts: list[str] = []
    for size, count in rows(chosen.only, chosen.most_mb, goals=chosen.goals):
        windows = 1 if chosen.warm else min(MOST_WINDOWS, -(-ROTATED_BYTES // (size * count)))
        room = Room(size, count, windows)
        cells = measure(room, rounds=chosen.rounds, seconds=chosen.seconds)
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


def rows(only: str | None, most_mb: int, *, goals: bool) -> Iterator[tuple[int, int]]:
    if only:
        size, _, count = only.partition("x")
        yield int(size), int(count)
        return
    for size in SIZES:
        for count in COUNTS:
            aimed = is_large(size, count) or is_smallest(size, count)
            if size * count <= most_mb << 20 and (aimed or not goals):
                yield size, count


def is_large(size: int, count: int) -> bool:
    """Whether speed has a goal."""
    return size * count >= 8 << 20 and size >= 64 << 10


def is_smallest(size: int, count: int) -> bool:
    """Whether latency has one."""
    return (size, count) == (SIZES[0], 1)


def measure(room: Room, *, rounds: int, seconds: float) -> dict[str, Cell]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="diptych-bench-") as folder:
        identity = LinkIdentity()
        kinds = offered(LinkSettings(kinds=KINDS))
        settings = LinkSettings(kinds=kinds, directory=Path(folder), stall_s=STALL_S)
        writing = open_writing(WRITER, settings)
        asked = {
            "size": room.size,
            "count": room.count,
            "windows": room.windows,
            "folder": folder,
            "kinds": kinds,
            "certificate": identity.certificate.hex(),
            "agent": writing.agent.hex() if writing else "",
        }
        with child(__file__, asked) as reader:
            ways = Ways(reader, room, Writer(settings, identity, writing))
            cells = {name: Cell() for name in ways.ways}
            measuring = Measuring(reader, room, seconds)
            for way in ways.ways.values():
                measuring.repeated(way, checked=True, least=room.windows)
            for _ in range(rounds):
                for name, way in ways.ways.items():
                    measuring.one(cells[name], way)
            ways.close()
        if writing is not None:
            writing.close()
        return cells


@dataclass
class Measuring:
    """Times moves, each of the next window."""

    reader: Child
    room: Room
    seconds: float
    window: int = 0

    def one(self, cell: Cell, way: Way) -> None:
        """A round of one way."""
        n_bytes = self.room.size * self.room.count
        cpu_s = own_cpu_s() + self.reader.ask("cpu")
        times = self.repeated(way, checked=False)
        gigabytes = len(times) * n_bytes / 1e9
        cell.cpu_s_per_gb.append((own_cpu_s() + self.reader.ask("cpu") - cpu_s) / gigabytes)
        cell.gb_per_s.append(n_bytes / 1e9 / statistics.median(times))
        cell.latency_ms.append(statistics.median(times) * 1000)
        times = self.repeated(way, checked=True)
        cell.checked.append(n_bytes / 1e9 / statistics.median(times))

    def repeated(self, way: Way, *, checked: bool, least: int = 3) -> list[float]:
        """How long each move took, with the reader's hashing if `checked`."""
        times: list[float] = []
        end_s = time.perf_counter() + self.seconds
        while len(times) < least or time.perf_counter() < end_s:
            self.window = (self.window + 1) % self.room.windows
            began_s = time.perf_counter()
            way.move(self.window, checked)
            times.append(time.perf_counter() - began_s)
            if checked and way.verify:
                times[-1] += self.reader.ask(f"verify {way.verify} {self.window}")
        return times


def judged(size: int, count: int, cells: dict[str, Cell]) -> Iterator[str]:
    if is_large(size, count):
        for way, (whom, plain_frac, checked_frac) in GOALS.items():
            if way in cells:
                row, whole = f"{size >> 10} KiB x {count}", statistics.median(cells[whom].gb_per_s)
                seen = statistics.median(cells[way].gb_per_s) / whole
                yield verdict(f"{row}: {way} of {whom}", seen, plain_frac)
                if checked_frac is not None:
                    seen = statistics.median(cells[way].checked) / whole
                    yield verdict(f"{row}: {way} checked, of {whom}", seen, checked_frac)
    if is_smallest(size, count):
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


if __name__ == "__main__":
    main()
