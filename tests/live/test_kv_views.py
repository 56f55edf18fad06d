"""`diptych kv` and `diptych doctor links` against running processes."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

TOLD_S = 120.0
SIDES = ("outgoing", "transfers")


def diptych(stack: LiveStack, *arguments: str, code: int | None = 0) -> str:
    command = (sys.executable, "-m", "diptych_cli", *arguments, *stack.where)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done.stdout + done.stderr


def told(stack: LiveStack, holds: Callable[[str], bool], *arguments: str) -> str:
    """What a command says once it `holds`: a worker that does not come to run is left out."""
    give_up_s = time.monotonic() + TOLD_S
    while not holds(text := diptych(stack, *arguments, code=None)) and time.monotonic() < give_up_s:
        time.sleep(0.2)
    return text


def handed_over(stack: LiveStack, link: str) -> str:
    """The id of a request whose KV went over `link`, as its client has it."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Count the sheep over {link}. " * 20}],
        "temperature": 0,
        "max_tokens": 4,
        "diptych": {"mode": "remote", "link": link},
    }
    request = urllib.request.Request(
        f"{stack.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    assert said["usage"]["diptych"]["attempt"] == 1
    return str(said["id"])


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_both_sides_tell_the_story_of_a_request(link: str, stack: LiveStack) -> None:
    name = handed_over(stack, link)
    request = name.removeprefix("chatcmpl-")

    def whole(text: str) -> bool:
        return "both sides agree: handed over" in text

    text = told(stack, whole, "kv", "trace", name)

    assert text.startswith(f"{request}.1")
    assert ", its writer: released: handed over" in text
    assert ", its reader: released: imported" in text
    assert "both sides agree: handed over" in text

    def both(text: str) -> bool:
        workers = json.loads(text)["workers"]
        return all(any(worker.get(side) for worker in workers) for side in SIDES)

    seen: dict[str, Any] = json.loads(told(stack, both, "kv", "trace", request[:12], "--json"))
    (written,) = (one for worker in seen["workers"] for one in worker.get("outgoing", ()))
    (read,) = (one for worker in seen["workers"] for one in worker.get("transfers", ()))
    assert written["transfer_id"] == read["transfer_id"] == f"{request}.1"
    assert written["n_bytes"] == read["n_bytes"] > 100_000
    assert written["moving_ms"] > 0
    assert written["remainder_ms"] > 0
    assert 0 <= written.get("overlap_frac", 0) <= 1
    assert [step["state"] for step in read["steps"]] == [
        "reserved",
        "written",
        "verified",
        "released",
    ]


def test_what_nobody_knows_is_said_so(stack: LiveStack) -> None:
    assert "no worker knows a transfer" in diptych(stack, "kv", "trace", "ffffffff.7", code=1)


def test_slots_of_each_worker_are_told(stack: LiveStack) -> None:
    free = "160 slots of 1,476,080 bytes: 160 free, 0 held, 0 in quarantine"
    assert free in told(stack, lambda text: free in text, "kv", "blocks")

    def slots(text: str) -> list[int]:
        return [worker["slots"] for worker in json.loads(text)["workers"]]

    both = [160, 160]
    text = told(stack, lambda text: slots(text) == both, "kv", "blocks", "--json")
    assert slots(text) == both


def test_each_pair_is_told_with_its_link_and_where_it_runs(stack: LiveStack) -> None:
    handed_over(stack, "shm")
    prefill = stack.of("prefill-worker").incarnation
    decode = stack.of("decode-worker").incarnation

    def whole(text: str) -> bool:
        return "does not answer" not in text and f"{prefill} to {decode}: shm" in text

    text = told(stack, whole, "doctor", "links")

    assert f"{prefill} to {decode}: shm" in text
    assert "same model and layout" in text
    for worker in (prefill, decode):
        (line,) = (one for one in text.splitlines() if one.startswith(f"{worker} ("))
        assert "does not answer" not in line
        assert "NUMA" in line
        assert "codec raw, takes raw zstd" in line
