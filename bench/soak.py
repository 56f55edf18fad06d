"""Does anything grow? `make soak` (30 minutes; `make soak MINUTES=3`).

Real processes, real NATS, real HTTP; the engine is `sim`, which computes nothing. First what the
stack carries is measured, then half of that is offered: streams, whole answers, clients that leave,
stored responses, clients that come back. Every answer is compared with the first one to the same
question. The exit code says whether nothing grew, nothing was lost and nothing is held at the end.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from soaking.load import Clients
from soaking.samples import SERVICES, StreamSize, Watched, everybody, stream_sizes

from diptych_testkit.growth import Growth, growth
from diptych_testkit.live_stack import LiveStack

SAMPLE_S = 5.0
CAPACITY_S = 20.0
CLIENTS = 24
MAX_PER_100K_MB = 5.0
MAX_IN_THE_END_MB = 2.0
ENOUGH_REQUESTS = 20_000
"""With fewer, caches that are bounded (4,096 ended attempts of a worker) are still being filled."""
AT_REST_S = 5.0
_WORKERS = {"MAX_SEQUENCES": "64", "KV_TOKENS": "65536", "TRANSFER_SLOTS": "512"}
_HELD = ("owned", "streams", "running", "waiting", "slots")


async def sampled(watched: list[Watched], clients: Clients, begun_s: float) -> None:
    """Look at everything every few seconds until cancelled."""
    while True:
        at_s = time.monotonic() - begun_s
        for one in watched:
            await asyncio.to_thread(one.look, at_s, clients.tally.ended)
        await asyncio.sleep(SAMPLE_S)


async def soak(stack: LiveStack, options: argparse.Namespace) -> bool:
    """The whole run; gives whether it passed."""
    clients, watched = Clients(stack.port, options.seed), everybody(stack)
    capacity = options.rate * 2 or await clients.closed_loop(CLIENTS, CAPACITY_S)
    rate, seconds = capacity / 2, options.minutes * 60
    print(f"capacity {capacity:.1f} requests/s; offering {rate:.1f} for {options.minutes:g} min")
    sys.stdout.flush()
    begun_s = time.monotonic()
    sampling = asyncio.create_task(sampled(watched, clients, begun_s))
    before = clients.tally.ended
    await clients.offer(rate, seconds)
    ended = clients.tally.ended - before
    sampling.cancel()
    await asyncio.wait([sampling])
    held = await at_rest(watched)
    sizes = await stream_sizes(stack)
    print(f"{ended:,} requests at {ended / (time.monotonic() - begun_s):.1f}/s:", end=" ")
    print(", ".join(f"{n:,} {kind}" for kind, n in sorted(clients.tally.kinds.items())))
    if options.json is not None:
        options.json.write_text(json.dumps(everything(watched)))
    verdicts = [*memory(watched), *streams(sizes), *at_the_end(clients, held)]
    print("PASS" if all(verdicts) else "FAIL")
    return all(verdicts)


async def at_rest(watched: list[Watched]) -> dict[str, dict[str, float]]:
    """What services still hold; {} as soon as that is nothing, else after 5 s."""
    give_up_s = time.monotonic() + AT_REST_S
    while True:
        held = {}
        for one in watched:
            gauges = await asyncio.to_thread(one.gauges)
            if some := {name: gauges[name] for name in _HELD if gauges.get(name)}:
                held[one.name] = some
        if not held or time.monotonic() > give_up_s:
            return held
        await asyncio.sleep(0.25)


def memory(watched: list[Watched]) -> Iterator[bool]:
    """Print what each process took; yields whether it kept its limits."""
    print(f"\n{'process':16}{'RSS MB':>16}{'grew':>8}{'/100k':>8}  {'fds':>9} {'threads':>9} tasks")
    for one in watched:
        seen = growth(one.samples)
        good = one.name not in SERVICES or kept(seen)
        print(
            f"{one.name:16}{seen.first_mb:8.1f}{seen.last_mb:8.1f}{seen.in_the_end_mb:8.2f}"
            f"{seen.per_100k_mb:8.2f}  {ends(one, 'fds'):>9} {ends(one, 'threads'):>9} "
            f"{tasks(one)}{'' if good else '   <- grows'}"
        )
        yield good
    print(
        f"(over the last {seen.window_s / 60:.1f} min; limits per service: "
        f"{MAX_IN_THE_END_MB:g} MB, and {MAX_PER_100K_MB:g} MB per 100,000 requests"
        f"{'' if seen.requests >= ENOUGH_REQUESTS else ', not judged: too few of them'})"
    )


def kept(seen: Growth) -> bool:
    """Whether a service's growth is within its limits."""
    steady = seen.requests < ENOUGH_REQUESTS or seen.per_100k_mb <= MAX_PER_100K_MB
    return seen.in_the_end_mb <= MAX_IN_THE_END_MB and steady


def ends(one: Watched, what: str) -> str:
    """A number when what counts began, and at the end."""
    looks = one.looks[len(one.looks) // 3 :]
    return f"{getattr(looks[0], what)}..{getattr(looks[-1], what)}"


def tasks(one: Watched) -> str:
    """asyncio tasks, most and last."""
    counts = [look.gauges["tasks"] for look in one.looks if "tasks" in look.gauges]
    return f"<= {max(counts):.0f}, {counts[-1]:.0f} last" if counts else ""


def streams(sizes: list[StreamSize]) -> Iterator[bool]:
    """Print what the server stores; yields whether each stream kept its limits."""
    print(f"\n{'stream':16}{'messages':>12}{'MB':>10}{'of':>8}{'oldest s':>10}{'of':>8}")
    for size in sizes:
        print(
            f"{size.name:16}{size.messages:12,}{size.n_bytes / 2**20:10.1f}"
            f"{size.max_bytes / 2**20:8.0f}{size.oldest_s:10.0f}{size.max_age_s:8.0f}"
            f"{'' if size.within else '   <- beyond its limits'}"
        )
        yield size.within


def at_the_end(clients: Clients, held: dict[str, dict[str, float]]) -> Iterator[bool]:
    """Print errors and what is still held; yields whether there is none."""
    errors = clients.tally.errors
    print(f"\nerrors: {errors.total()}")
    for what, count in errors.most_common(10):
        print(f"  {count} x {what}")
    yield not errors
    print(f"held {AT_REST_S:g} s after the last request: {held or 'nothing'}")
    yield not held


def everything(watched: list[Watched]) -> dict[str, list[list[float]]]:
    """Every sample: time, requests, RSS, descriptors, threads."""
    return {
        one.name: [
            [round(sample.at_s, 1), sample.requests, sample.rss_bytes, look.fds, look.threads]
            for sample, look in zip(one.samples, one.looks, strict=False)
        ]
        for one in watched
    }


def main() -> None:
    """Soak, print, and exit with 1 if something grew."""
    parser = argparse.ArgumentParser(description="Whether memory is flat over a long run.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s instead of half load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load {load:.1f} before, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        stack = LiveStack(Path(folder), engine="sim", LOG_LEVEL="warning")
        try:
            stack.start_all(_WORKERS)
            passed = asyncio.run(soak(stack, options))
        finally:
            stack.close()
    sys.exit(not passed)


if __name__ == "__main__":
    main()
