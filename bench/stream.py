"""Orchestration alone: `python bench/stream.py`.

Real processes, real NATS, real HTTP; the engine is `sim`, which computes nothing. So tokens per
second are what the machinery can carry on this machine, and CPU per token is what it costs. The
client of all streams is this process, on the same cores, and is listed too.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from diptych_testkit.live_stack import MODEL, LiveStack

SERVICES = ("prefill-worker", "decode-worker", "scheduler", "power-governor", "gateway")
STREAM_S = 60.0
_TEXT = re.compile(rb'"content":"[^"]')
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Stream:
    """What one client saw."""

    tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of all streams took."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    cpu_us: dict[str, float]
    """Per token, by process."""


def body(number: int, tokens: int, mode: str) -> bytes:
    """The request of stream `number`."""
    question = f"Stream {number}: tell me a story that nobody has told."
    return json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "diptych": {"mode": mode},
        }
    ).encode()


async def one_stream(port: int, payload: bytes) -> Stream:
    """Send one request over its own connection and read its events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    begun_s = time.perf_counter()
    writer.write(head.encode() + payload)
    first_s, tail = None, b""
    while data := await reader.read(1 << 16):
        tail = tail[-2048:] + data
        if first_s is None and _TEXT.search(tail):
            first_s = time.perf_counter()
    writer.close()
    found = _USAGE.search(tail)
    if first_s is None or found is None or b"[DONE]" not in tail:
        raise SystemExit(f"a stream did not end well: {tail[-500:]!r}")
    return Stream(int(found[1]), first_s - begun_s)


async def all_streams(port: int, *, streams: int, tokens: int, mode: str) -> list[Stream]:
    """All streams at once."""
    async with asyncio.timeout(STREAM_S):
        return await asyncio.gather(
            *(one_stream(port, body(number, tokens, mode)) for number in range(streams))
        )


def cpu_s(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """CPU time so far, user and system, by process."""
    times = {name: process.cpu_times() for name, process in processes.items()}
    return {name: spent.user + spent.system for name, spent in times.items()}


def run(stack: LiveStack, processes: dict[str, psutil.Process], options: argparse.Namespace) -> Run:
    """One run; raises `SystemExit` if a stream is not whole."""
    before, begun_s = cpu_s(processes), time.perf_counter()
    streams = asyncio.run(
        all_streams(stack.port, streams=options.streams, tokens=options.tokens, mode=options.mode)
    )
    took_s, after = time.perf_counter() - begun_s, cpu_s(processes)
    if any(stream.tokens != options.tokens for stream in streams):
        raise SystemExit(f"expected {options.tokens} tokens in each stream")
    tokens = sum(stream.tokens for stream in streams)
    ttfts_ms = sorted(stream.ttft_s * 1000 for stream in streams)
    return Run(
        tokens_per_s=tokens / took_s,
        ttft_p50_ms=statistics.median(ttfts_ms),
        ttft_p99_ms=ttfts_ms[min(len(ttfts_ms) - 1, round(0.99 * len(ttfts_ms)))],
        cpu_us={name: (after[name] - before[name]) / tokens * 1e6 for name in processes},
    )


def hardware() -> str:
    """One line on the machine."""
    model = "unknown CPU"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        model = found[1] if found else model
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} x {model}, load {load:.1f} before, Python {platform.python_version()}"


def spread(values: list[float], unit: str) -> str:
    """Median, and the range in brackets."""
    return f"{statistics.median(values):9,.1f} {unit}  [{min(values):,.1f} .. {max(values):,.1f}]"


def measure(options: argparse.Namespace, folder: Path) -> list[Run]:
    """A stack, one run to warm it up, and the runs that count."""
    stack = LiveStack(folder, engine="sim")
    try:
        stack.start_all(
            {
                "MAX_SEQUENCES": str(options.streams),
                "KV_TOKENS": str(options.streams * (options.tokens + 1024)),
                "TRANSFER_SLOTS": str(8 * options.streams),
            }
        )
        pids = {service: stack.of(service).popen.pid for service in SERVICES}
        pids |= {"nats-server": stack.nats.pid, "(this client)": os.getpid()}
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        run(stack, processes, options)
        return [run(stack, processes, options) for _ in range(options.runs)]
    finally:
        stack.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What orchestration carries, and costs.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mode", choices=("remote", "local"), default="remote")
    options = parser.parse_args()
    machine = hardware()
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(options, Path(folder))
    print(
        f"{options.streams} streams x {options.tokens} tokens, {options.mode}, engine sim, "
        f"{options.runs} runs: median [range]\n{machine}"
    )
    print(f"  {'throughput':16}", spread([r.tokens_per_s for r in runs], "tokens/s"))
    print(f"  {'TTFT p50':16}", spread([r.ttft_p50_ms for r in runs], "ms"))
    print(f"  {'TTFT p99':16}", spread([r.ttft_p99_ms for r in runs], "ms"))
    print("CPU per token")
    for name in runs[0].cpu_us:
        print(f"  {name:16}", spread([r.cpu_us[name] for r in runs], "us"))
    print(f"  {'all services':16}", spread([_served(r) for r in runs], "us"))


def _served(run_: Run) -> float:
    return sum(us for name, us in run_.cpu_us.items() if not name.startswith("("))


if __name__ == "__main__":
    main()
