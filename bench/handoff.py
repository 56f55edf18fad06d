"""What a hand-off costs, per KV link, on the real stack: `python bench/handoff.py` (a minute).

Hand-off: from the end of prefill until the decode worker has verified the KV and accepted the job,
two messages over the bus included. The first token leaves before it, the second waits for it; its
share is told in TTFT all the same.
GB/s: KV bytes over the time anyone at the writer spends on moving them, most of it hidden behind
compute: export by the engine (over shm straight into the reader's slot), checksum, send, ack.
Links take turns, so that a noisy machine disturbs them alike. Needs weights as `make live` does.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from diptych_testkit.live_stack import MODEL, LiveStack

LINKS = ("shm", "tcp")


@dataclass
class Column:
    """One link's runs."""

    share_percent: list[float] = field(default_factory=list)
    handoff_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    moved_gb_per_s: list[float] = field(default_factory=list)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=8)
    options.add_argument("--seconds", type=float, default=60, help="no run begins after this")
    options.add_argument("--words", type=int, default=200, help="about 2 tokens each")
    chosen = options.parse_args()
    columns = {link: Column() for link in LINKS}
    with tempfile.TemporaryDirectory() as folder:
        stack = LiveStack(Path(folder))
        try:
            stack.start_all({"PREFIX_CACHE": "false"})  # each link computes the whole prompt
            for link in LINKS:
                ask(stack, link, prompt(-1, chosen.words))
            give_up_s = time.monotonic() + chosen.seconds
            for run in range(chosen.runs):
                if time.monotonic() > give_up_s:
                    break
                for link in LINKS:
                    told = measure(stack, link, prompt(run, chosen.words), columns[link])
        finally:
            stack.close()
    print(hardware())
    megabytes = told["diptych"]["transfer_bytes"] / 1e6
    print(f"{MODEL}, {told['prompt_tokens']} prompt tokens, {megabytes:.1f} MB of KV, ", end="")
    print(f"{len(columns[LINKS[0]].ttft_ms)} runs; median (min to max)")
    for line in table(columns):
        print(line)


def prompt(run: int, words: int) -> str:
    """Text that no earlier run has in common."""
    return f"Run {run}. " + " ".join(f"sheep {run} {number}" for number in range(words // 3))


def measure(stack: LiveStack, link: str, text: str, column: Column) -> dict:
    before = moved(stack, link)
    usage = ask(stack, link, text)
    n_bytes, moving_s, handoff_s = (b - a for a, b in zip(before, moved(stack, link), strict=True))
    told = usage["diptych"]
    assert (told["mode"], told["link"], told["transfer_bytes"]) == ("remote", link, n_bytes), told
    column.share_percent.append(100 * handoff_s * 1000 / told["ttft_ms"])
    column.handoff_ms.append(handoff_s * 1000)
    column.ttft_ms.append(told["ttft_ms"])
    column.moved_gb_per_s.append(n_bytes / moving_s / 1e9)
    return usage


def ask(stack: LiveStack, link: str, text: str) -> dict:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "diptych": {"mode": "remote", "link": link},
    }
    request = urllib.request.Request(
        f"{stack.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["usage"]


def moved(stack: LiveStack, link: str) -> list[float]:
    """KV bytes the prefill worker wrote over `link`, seconds of moving them, and of hand-offs."""
    port = stack.of("prefill-worker").health_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    names = ("bytes_total", "moving_seconds_total", "duration_seconds_sum")
    return [value(lines, f'diptych_kv_transfer_{name}{{link="{link}"}}') for name in names]


def value(lines: list[str], series: str) -> float:
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series)), 0.0)


def table(columns: dict[str, Column]) -> Iterator[str]:
    yield f"{'':5}{'share of TTFT, %':>26}{'hand-off, ms':>26}{'TTFT, ms':>26}{'moved, GB/s':>26}"
    for link, column in columns.items():
        cells = (
            spread(column.share_percent, 2),
            spread(column.handoff_ms, 1),
            spread(column.ttft_ms, 0),
            spread(column.moved_gb_per_s, 2),
        )
        yield f"{link:5}" + "".join(f"{cell:>26}" for cell in cells)


def spread(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    load = os.getloadavg()[0]
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}; load {load:.1f}"


if __name__ == "__main__":
    main()
