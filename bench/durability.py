"""What it costs to have everything on the disk first: `python bench/durability.py`.

The real nats-server: as it is by default (the kernel has what was acknowledged), with
`sync_interval: always` (the disk has it), and three of them on this machine that keep each other's
streams (R3, two of three have it). Two figures that requests feel: one acknowledged write at a
time, as a request is accepted or a record swapped; and journal entries through the ring, as a busy
worker's tokens.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.server import NatsServer
from diptych_contracts.errors import Transient
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import TokenEntry, TokenFrame
from diptych_testkit.nats import running_cluster

RING = 2048
"""Half of what fits into a worker's ring."""
GATEWAY = Incarnation("gateway-bench")


def frame(index: int) -> TokenFrame:
    """The tokens of one step of 16 sequences, about 1 kB."""
    entries = tuple(
        TokenEntry(request_id=RequestId(f"{n:032x}"), attempt=1, index=index, token_ids=(index,))
        for n in range(16)
    )
    return TokenFrame(worker=Incarnation("decode-worker-bench"), entries=entries)


async def connected(url: str, replicas: int) -> JetStreamBus:
    """A bus; a cluster needs a moment to choose its leader."""
    for _ in range(60):
        try:
            return await JetStreamBus.connect(url, name="bench", wait_s=5.0, replicas=replicas)
        except Transient:
            await asyncio.sleep(0.5)
    raise SystemExit("the cluster has no leader")


async def measure(
    url: str, options: argparse.Namespace, replicas: int
) -> tuple[list[float], float]:
    """Milliseconds of each write, and frames per second."""
    bus = await connected(url, replicas)
    took_ms, frames = [], options.frames
    for index in range(options.writes):
        begun_s = time.perf_counter()
        await bus.record(GATEWAY, frame(index), timeout_s=5.0)
        took_ms.append((time.perf_counter() - begun_s) * 1000)
    begun_s = time.perf_counter()
    for index in range(frames):
        bus.append(GATEWAY, frame(index))
        if index % RING == RING - 1 and not await bus.flush(timeout_s=60.0):
            raise SystemExit("the journal did not take it all within a minute")
    await bus.flush(timeout_s=60.0)
    rate = frames / (time.perf_counter() - begun_s)
    await bus.close()
    return sorted(took_ms), rate


@contextmanager
def serving(mode: str, folder: Path) -> Iterator[str]:
    """A server, or three, of that mode; gives where."""
    if mode == "R3":
        with running_cluster(folder) as cluster:
            yield cluster.urls[0]
        return
    server = NatsServer(folder, durable=mode == "always")
    server.start_blocking()
    try:
        yield server.url
    finally:
        server.stop_blocking()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What durability costs.")
    parser.add_argument("--writes", type=int, default=500)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print(f"{'':16}{'write p50 ms':>14}{'p99':>8}{'frames/s':>12}")
    for mode in ("default", "always", "R3"):
        p50s, p99s, rates = [], [], []
        for _ in range(options.runs):
            with (
                tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
                serving(mode, Path(folder)) as url,
            ):
                took_ms, rate = asyncio.run(measure(url, options, 3 if mode == "R3" else 1))
            p50s.append(statistics.median(took_ms))
            p99s.append(took_ms[int(len(took_ms) * 0.99)])
            rates.append(rate)
        print(
            f"{mode:16}{statistics.median(p50s):14.2f}{statistics.median(p99s):8.2f}"
            f"{statistics.median(rates):12,.0f}   [{min(rates):,.0f} .. {max(rates):,.0f}]"
        )


if __name__ == "__main__":
    main()
