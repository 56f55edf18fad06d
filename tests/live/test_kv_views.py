"""`diptych kv` and `diptych doctor links` against running processes."""

import json
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def diptych(stack: LiveStack, *arguments: str, code: int = 0) -> str:
    command = (sys.executable, "-m", "diptych_cli", *arguments, *stack.where)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


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
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    assert told["usage"]["diptych"]["attempt"] == 1
    return str(told["id"])


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_both_sides_tell_the_story_of_a_request(link: str, stack: LiveStack) -> None:
    name = handed_over(stack, link)
    request = name.removeprefix("chatcmpl-")

    text = diptych(stack, "kv", "trace", name)

    assert text.startswith(f"{request}.1")
    assert ", its writer: released: handed over" in text
    assert ", its reader: released: imported" in text
    assert "both sides agree: handed over" in text
    told: dict[str, Any] = json.loads(diptych(stack, "kv", "trace", request[:12], "--json"))
    (written,) = (one for worker in told["workers"] for one in worker.get("outgoing", ()))
    (read,) = (one for worker in told["workers"] for one in worker.get("transfers", ()))
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
    text = diptych(stack, "kv", "blocks")
    assert "160 slots of 1,476,080 bytes: 160 free, 0 held, 0 in quarantine" in text
    told = json.loads(diptych(stack, "kv", "blocks", "--json"))
    assert [worker["slots"] for worker in told["workers"]] == [160, 160]


def test_each_pair_is_told_with_its_link_and_where_it_runs(stack: LiveStack) -> None:
    handed_over(stack, "shm")
    prefill = stack.of("prefill-worker").incarnation
    decode = stack.of("decode-worker").incarnation

    text = diptych(stack, "doctor", "links")

    assert f"{prefill} to {decode}: shm" in text
    assert "same model and layout" in text
    for worker in (prefill, decode):
        (line,) = (one for one in text.splitlines() if one.startswith(f"{worker} ("))
        assert "does not answer" not in line
        assert "NUMA" in line
        assert "codec raw, takes raw zstd" in line
