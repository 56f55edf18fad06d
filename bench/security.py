"""What TLS and permissions cost: `python bench/security.py`.

The real nats-server three ways: open to everybody, as no product runs it; with TLS and identities
that may do everything; with TLS and the rights of each role. Two figures: a request to a worker and
its answer, one at a time; and a frame of 16 tokens on its way from a worker through the journal to
a gateway, many at a time. Both ends run in this process, so the price of both is in it. The ways
take turns, so that what else happens on the machine meets all of them; and beside the time that
passed stands the processor's time, of this process and the server together, which others do not
change much.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.port import Delivery
from diptych_contracts import subjects
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import TokenEntry, TokenFrame
from diptych_identity.roles import Role
from diptych_testkit.guarded_nats import TESTER, guarded_nats
from diptych_testkit.nats import running_nats

WORKER, GATEWAY = Incarnation("decode-worker-bench"), Incarnation("gateway-bench")
WAYS = ("plain", "TLS", "TLS + permissions")
RING = 2048
Join = Callable[[Role, str], Awaitable[JetStreamBus]]


@dataclass(frozen=True, slots=True)
class Place:
    """A server, and how to join it."""

    join: Join
    pid: int

    def cpu_s(self) -> float:
        """What this process and the server have computed so far."""
        server = psutil.Process(self.pid).cpu_times()
        return time.process_time() + server.user + server.system


def frame(index: int) -> TokenFrame:
    """The tokens of one step of 16 sequences, about 1 kB."""
    entries = tuple(
        TokenEntry(request_id=RequestId(f"{n:032x}"), attempt=1, index=index, token_ids=(index,))
        for n in range(16)
    )
    return TokenFrame(worker=WORKER, entries=entries)


@asynccontextmanager
async def server(way: str, folder: Path) -> AsyncIterator[Place]:
    """A server of that way; gives how to join it."""
    if way == "plain":
        with running_nats(folder) as plain:
            url = plain.url
            yield Place(
                lambda _, name: JetStreamBus.connect(url, name=name, wait_s=30.0), plain.pid
            )
        return
    with guarded_nats(folder) as guarded:
        anybody = way == "TLS"
        yield Place(
            lambda role, name: guarded.join(TESTER if anybody else role, name), guarded.server.pid
        )


async def round_trip_us(place: Place, count: int) -> tuple[float, float]:
    """Of a scheduler's request to a worker: passed, computed."""
    worker = await place.join(Role.DECODE_WORKER, WORKER)
    scheduler = await place.join(Role.SCHEDULER, "s")

    async def answer(delivery: Delivery) -> Beat:
        return Beat(member=WORKER, service="decode-worker", count=len(delivery.data))

    await worker.serve(subjects.job(WORKER), answer)
    took: list[float] = []
    cpu_s = place.cpu_s()
    for index in range(count):
        begun_s = time.perf_counter()
        await scheduler.request(subjects.job(WORKER), frame(index), Beat, timeout_s=5.0)
        took.append(time.perf_counter() - begun_s)
    cpu_s = place.cpu_s() - cpu_s
    await worker.close()
    await scheduler.close()
    return statistics.median(took) * 1e6, cpu_s / count * 1e6


async def frame_us(place: Place, count: int) -> tuple[float, float]:
    """Of a frame from a worker's ring to a gateway's reader, in a stream: passed, computed."""
    worker = await place.join(Role.DECODE_WORKER, WORKER)
    gateway = await place.join(Role.GATEWAY, GATEWAY)
    seen = 0
    whole = asyncio.Event()

    def hear(_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            whole.set()

    following = await gateway.follow(GATEWAY, hear)
    begun_s, cpu_s = time.perf_counter(), place.cpu_s()
    for index in range(count):
        worker.append(GATEWAY, frame(index))
        if index % RING == RING - 1:
            await worker.flush(timeout_s=60.0)
    async with asyncio.timeout(120):
        await whole.wait()
    took_s, cpu_s = time.perf_counter() - begun_s, place.cpu_s() - cpu_s
    await following.close()
    await worker.close()
    await gateway.close()
    return took_s / count * 1e6, cpu_s / count * 1e6


async def measured(options: argparse.Namespace) -> dict[str, list[tuple[float, ...]]]:
    """The four figures of each way, once per round."""
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                async with server(way, Path(folder)) as place:
                    trip = await round_trip_us(place, options.requests)
                    found[way].append((*trip, *await frame_us(place, options.frames)))
    return found


def told(values: tuple[float, ...]) -> str:
    """Median and spread."""
    return f"{statistics.median(values):.0f} [{min(values):.0f} .. {max(values):.0f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What TLS and permissions cost.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    found = asyncio.run(measured(parser.parse_args()))
    heads = ("request, µs", "of CPU", "token frame, µs", "of CPU")
    print(f"{'':20}" + "".join(f"{head:24}" for head in heads))
    for way, rounds in found.items():
        print(f"{way:20}" + "".join(f"{told(values):24}" for values in zip(*rounds, strict=True)))


if __name__ == "__main__":
    main()
