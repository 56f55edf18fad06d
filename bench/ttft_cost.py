"""What handing over costs the first token: `python bench/ttft_cost.py` (two to three minutes).

The same prompt is answered twice in a row, once by one worker (`local`) and once handed over
(`remote`, over one link), the order drawn anew each time, on the real stack, nothing else running;
the prefix cache is off, so both compute the whole prompt. Told are medians over all pairs (least to
most), and of the pairs' own differences, which a slow spell of the machine spoils less.

TTFT: from sending the request to the first token's bytes, at the client. The first token leaves
before the hand-off, the second waits for it. Before compute: as usage tells; handed over, it has
the reservation in it. Remainder: from the end of compute to the peer's acceptance, as the prefill
worker tells (mean). Exports (0.3 ms a block) are in TTFT only. Needs weights as `make live` does.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from handoff import hardware, prompt, spread, value

from diptych_testkit.live_stack import MODEL, LiveStack

LOCAL = "local"


@dataclass
class Column:
    """One path's runs, in ms."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    """From a worker's acceptance until it computes: where handed over, the reservation's time."""
    gap: list[float] = field(default_factory=list)
    """From the first token to the second."""


@dataclass
class Figures:
    """What was measured: by path, and of each pair how much more the link took, in %."""

    columns: dict[str, Column]
    pairs: dict[str, Column]


@dataclass
class Answer:
    """One answer: when its tokens came, in ms, and what usage tells."""

    first: float
    second: float
    usage: dict


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=16, help="pairs, for each link")
    options.add_argument("--seconds", type=float, default=150, help="no pair begins after this")
    options.add_argument("--words", type=int, default=270, help="about 2 tokens each")
    options.add_argument("--links", default="shm,tcp")
    chosen = options.parse_args()
    links = chosen.links.split(",")
    rng = random.Random(1)
    columns = {path: Column() for path in (LOCAL, *links)}
    pairs = {link: Column() for link in links}
    figures = Figures(columns, pairs)
    with tempfile.TemporaryDirectory() as folder:
        stack = LiveStack(Path(folder))
        try:
            stack.start_all({"PREFIX_CACHE": "false"})
            for path in columns:
                ask(stack, path, prompt(-1, chosen.words))
            give_up_s = time.monotonic() + chosen.seconds
            before = {link: remainder(stack, link) for link in links}
            for run in range(chosen.runs):
                for link in links:
                    if time.monotonic() < give_up_s:
                        text = prompt(run, chosen.words)
                        usage = one_pair(stack, link, text, rng=rng, figures=figures)
            after = {link: remainder(stack, link) for link in links}
        finally:
            stack.close()
    print(hardware())
    told = usage["prompt_tokens"]
    print(f"{MODEL}, {told} prompt tokens ({-(-told // 64)} chunks), prefix cache off; ", end="")
    print(f"{', '.join(f'{len(pairs[link].first)} pairs {link}' for link in links)}")
    print(f"{'':8}{'TTFT, ms':>26}{'then to the second, ms':>26}{'before compute, ms':>26}")
    for path, column in columns.items():
        cells = (spread(column.first, 1), spread(column.gap, 1), spread(column.waited, 1))
        print(f"{path:8}" + "".join(f"{cell:>26}" for cell in cells))
    print(f"{'':8}{'TTFT, % more':>26}{'second token, % more':>26}{'remainder, ms':>16}")
    for link, pair in pairs.items():
        count, total_s = (a - b for a, b in zip(after[link], before[link], strict=True))
        mean = f"{total_s / count * 1000:.1f}" if count else "-"
        print(f"{link:8}{spread(pair.first, 2):>26}{spread(pair.second, 2):>26}{mean:>16}")
        share = f"{statistics.fmean(pair.first):+.2f} % +- {error(pair.first):.2f}"
        print(f"{'':8}mean of the pairs: {share} (standard error)")
        print(f"{'':8}{where_it_shows(columns[LOCAL], columns[link])}")


def one_pair(
    stack: LiveStack, link: str, text: str, *, rng: random.Random, figures: Figures
) -> dict:
    told, pairs = {}, figures.pairs
    for path in rng.sample((LOCAL, link), 2):
        told[path] = ask(stack, path, text)
        figures.columns[path].first.append(told[path].first)
        figures.columns[path].second.append(told[path].second)
        figures.columns[path].gap.append(told[path].second - told[path].first)
        figures.columns[path].waited.append(told[path].usage["diptych"]["prefill_wait_ms"])
    alone, handed_over = told[LOCAL], told[link]
    assert alone.usage["diptych"]["mode"] == LOCAL, alone.usage
    assert handed_over.usage["diptych"]["link"] == link, handed_over.usage
    assert handed_over.usage["diptych"]["attempt"] == 1, handed_over.usage
    pairs[link].first.append(100 * (handed_over.first / alone.first - 1))
    pairs[link].second.append(100 * (handed_over.second / alone.second - 1))
    return handed_over.usage


def ask(stack: LiveStack, path: str, text: str) -> Answer:
    forced = {"mode": LOCAL} if path == LOCAL else {"mode": "remote", "link": path}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "diptych": forced,
    }
    request = urllib.request.Request(
        f"{stack.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    times, usage = [], {}
    began_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            at_ms = (time.perf_counter() - began_s) * 1000
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            times += [at_ms for choice in event["choices"] if choice["delta"].get("content")]
    assert len(times) > 1, "too few pieces of text: choose another prompt"
    return Answer(times[0], times[1], usage)


def remainder(stack: LiveStack, link: str) -> list[float]:
    """Hand-offs over `link` up to now, and the seconds that remained of them after compute."""
    port = stack.of("prefill-worker").health_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    name = "diptych_kv_transfer_duration_seconds"
    return [value(lines, f'{name}_{what}{{link="{link}"}}') for what in ("count", "sum")]


def where_it_shows(alone: Column, handed_over: Column) -> str:
    """What is added where nothing else takes long: a noisy machine hardly changes it."""
    before, after = (
        statistics.median(getattr(handed_over, what)) - statistics.median(getattr(alone, what))
        for what in ("waited", "gap")
    )
    frac = (before + after) / statistics.median(alone.first)
    return (
        f"where it shows: {before:+.1f} ms before compute, {after:+.1f} ms between the first two "
        f"tokens, {frac:.2%} of TTFT"
    )


def error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


if __name__ == "__main__":
    main()
