"""`diptych up`, as a user runs it."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

READY_S = 90.0


class Up:
    """A running `diptych up` and what it printed."""

    def __init__(self, store: Path, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [sys.executable, "-m", "diptych_cli", "up", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--dir", str(store), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, text: str, within_s: float = READY_S) -> str:
        deadline_s = time.monotonic() + within_s
        while (
            line := self._queue.get(timeout=max(0.1, deadline_s - time.monotonic()))
        ) is not None:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} did not appear in:\n" + "\n".join(self.lines))

    def children(self) -> dict[str, psutil.Process]:
        """The stack's processes, by the last word of their command."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {child.cmdline()[-1]: child for child in found}

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(30)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        while (line := self._queue.get_nowait()) is not None:
            self.lines.append(line)
        return code

    def ask(self, question: str) -> dict[str, Any]:
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
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            parsed: dict[str, Any] = json.loads(answer.read())
        return parsed


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path / "store")
    yield up
    if up.process.poll() is None:
        up.end(signal.SIGKILL)


def test_it_serves_says_how_to_ask_and_stops_clean(up: Up) -> None:
    up.until(f"at http://127.0.0.1:{up.port}/v1 (ready in")
    up.until("curl -N ")
    up.until("Stop with Ctrl-C.")
    answer = up.ask("What is the capital of France?")
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["diptych"]["mode"] == "remote"
    children = list(up.children().values())
    assert len(children) == 6
    assert up.end(signal.SIGINT) == 0
    assert gone(children)
    assert not list(Path("/dev/shm").glob(f"*{children[0].pid}*"))


def test_a_killed_supervisor_leaves_no_orphan(up: Up) -> None:
    up.until("Stop with Ctrl-C.")
    children = list(up.children().values())
    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    assert gone(children)


def test_whoever_dies_comes_back(up: Up) -> None:
    up.until("Stop with Ctrl-C.")
    for name, victim in (("decode-worker", "diptych_decode_worker"), ("nats", "nats-server.conf")):
        found = next(p for last, p in up.children().items() if last.endswith(victim))
        os.kill(found.pid, signal.SIGKILL)
        up.until(f"{name:<14} | died (killed by signal 9); starting again in 0.5 s")
        up.until(f"{name:<14} | ready after")
    answer = up.ask("What is the capital of France?")
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert up.end(signal.SIGTERM) == 0


def test_weights_that_are_none_stop_the_stack_with_one_clear_line(tmp_path: Path) -> None:
    cat = tmp_path / "cat.gguf"
    cat.write_bytes(b"meow" * 1000)
    up = Up(tmp_path / "store", "--model", str(cat))
    told = up.until("start_failed")
    assert str(cat) in told
    up.until("cannot work like this (exit code 2): stopping the stack")
    assert up.ended() == 1
