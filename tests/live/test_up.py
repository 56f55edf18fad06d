"""`diptych up`, as a user runs it."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych_testkit.running_up import Up

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def children(up: Up) -> dict[str, psutil.Process]:
    """The stack's processes, by the last word of their command."""
    found = psutil.Process(up.process.pid).children(recursive=True)
    return {child.cmdline()[-1]: child for child in found}


def ask(up: Up, question: str) -> dict[str, Any]:
    body = {
        "model": "smollm2-135m",
        "max_tokens": 16,
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": question},
        ],
    }
    request = urllib.request.Request(
        f"{up.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    give_up_s = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                parsed: dict[str, Any] = json.loads(answer.read())
                return parsed
        except urllib.error.HTTPError as err:  # the bus may just be coming back
            if err.code != 503 or time.monotonic() > give_up_s:
                raise
            time.sleep(float(err.headers.get("retry-after", 1)))


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=120)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    yield up
    if up.process.poll() is None:
        up.end(signal.SIGKILL)


def test_it_serves_says_how_to_ask_and_stops_clean(up: Up) -> None:
    up.until(f"at http://127.0.0.1:{up.port}/v1 (ready in")
    up.until("curl -N ")
    up.until("Stop with Ctrl-C.")
    answer = ask(up, "What is the capital of France?")
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["diptych"]["mode"] == "remote"
    processes = list(children(up).values())
    assert len(processes) == 6
    assert up.end(signal.SIGINT) == 0
    assert gone(processes)
    assert not list(Path("/dev/shm").rglob(f"*{processes[0].pid}*"))


def test_a_killed_supervisor_leaves_no_orphan(up: Up) -> None:
    up.until("Stop with Ctrl-C.")
    processes = list(children(up).values())
    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    assert gone(processes)


def test_whoever_dies_comes_back(up: Up) -> None:
    up.until("Stop with Ctrl-C.")
    for name, victim in (("decode-worker", "diptych_decode_worker"), ("nats", "nats-server.conf")):
        found = next(p for last, p in children(up).items() if last.endswith(victim))
        os.kill(found.pid, signal.SIGKILL)
        up.until(f"{name:<14} | died (killed by signal 9); starting again in 0.5 s")
        up.until(f"{name:<14} | ready after")
    answer = ask(up, "What is the capital of France?")
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert up.end(signal.SIGTERM) == 0


def test_weights_that_are_none_stop_the_stack_with_one_clear_line(tmp_path: Path) -> None:
    cat = tmp_path / "cat.gguf"
    cat.write_bytes(b"meow" * 1000)
    up = Up(tmp_path, "--model", str(cat))
    told = up.until("start_failed")
    assert str(cat) in told
    up.until("cannot work like this (exit code 2): stopping the stack")
    assert up.ended() == 1
