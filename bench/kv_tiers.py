"""What KV in a tier saves, on the real stack: `python bench/kv_tiers.py` (three minutes).

TTFT of one prompt: computed, and restored from each tier. The engine's own prefix cache is off, so
that whatever is not restored is computed; what is in a tier is restored whatever it costs. Each
tier has a stack and prompts of its own. What a disk gives back here comes out of the page cache,
unless memory is short. Needs weights as `make live` does.
"""

import argparse
import json
import os
import platform
import re
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from diptych_testkit.live_stack import MODEL, LiveStack

_STORED = re.compile(r'^diptych_kv_tier_writes_total\{[^}]*outcome="stored"[^}]*\} (\S+)', re.M)
_STORED_S = 60.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=4)
    options.add_argument("--tokens", type=int, default=1500)
    options.add_argument("--threads", type=int, default=1)
    chosen = options.parse_args()
    print(hardware())
    columns: dict[str, list[float]] = {"computed": []}
    with tempfile.TemporaryDirectory() as folder:
        for tier in ("host:1GiB", f"disk:4GiB:{folder}/kv"):
            stack = LiveStack(Path(folder) / tier.partition(":")[0])
            name = f"restored from {tier.partition(':')[0]}"
            try:
                stack.start_all(settings(tier, threads=chosen.threads))
                for run in range(-1, chosen.runs):
                    text = prompt(f"{name} {run}", chosen.tokens)
                    cold, warm = both(stack, text)
                    if run >= 0:  # the first warms up
                        columns["computed"].append(cold["diptych"]["ttft_ms"])
                        columns.setdefault(name, []).append(warm["diptych"]["ttft_ms"])
            finally:
                stack.close()
    cached = warm["prompt_tokens_details"]["cached_tokens"]
    print(f"{MODEL}, {warm['prompt_tokens']} prompt tokens, {cached} of them restored")
    for name, values in columns.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:20} TTFT, ms: {middle:8.0f} ({low:.0f} to {high:.0f}), {len(values)} runs")


def settings(tier: str, *, threads: int) -> dict[str, str]:
    return {
        "KV_TIERS": tier,
        "KV_RESTORE": "always",
        "KV_TIER_SIGHTINGS": "1",
        "PREFIX_CACHE": "false",
        "THREADS": str(threads),
    }


def prompt(name: str, tokens: int) -> str:
    """Text that no other run has in common; four tokens to a word and its number, or so."""
    return f"{name}. " + " ".join(f"sheep {number % 10}" for number in range(tokens // 3))


def both(stack: LiveStack, text: str) -> tuple[dict, dict]:
    """A prompt's usage when it is new, and once its KV is in the tier."""
    before = stored(stack)
    cold = ask(stack, text)
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    give_up_s = time.monotonic() + _STORED_S
    while stored(stack) < before + cold["prompt_tokens"] // 64:
        assert time.monotonic() < give_up_s, "the tier does not take it"
        time.sleep(0.1)
    warm = ask(stack, text)
    assert warm["prompt_tokens_details"]["cached_tokens"] > 0
    return cold, warm


def stored(stack: LiveStack) -> float:
    page = stack.of("prefill-worker").page("/metrics").decode()
    return sum(float(count) for count in _STORED.findall(page))


def ask(stack: LiveStack, text: str) -> dict:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "diptych": {"mode": "remote"},
    }
    request = urllib.request.Request(
        f"{stack.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["usage"]


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    load = os.getloadavg()[0]
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}; load {load:.1f}"


if __name__ == "__main__":
    main()
