"""A stack of several of each spreads its work, changes its size under load, and loses nothing."""

import asyncio
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from diptych_testkit.live_stack import gguf_path
from diptych_testkit.running_up import Up

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

QUESTIONS = (
    "Tell me about the sea.",
    "Why is the sky blue?",
    "Write a poem about a mountain.",
    "Continue this list: 10, 20, 30, 40, 50, 60, 70, 80,",
)
LONGEST = 64
SERVICES = ("gateway", "scheduler", "prefill-worker", "decode-worker", "power-governor")
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    wanted = ["--prefill", "2", "--decode", "3", "--gateways", "2", "--schedulers", "2"]
    up = Up(tmp_path_factory.mktemp("up"), *wanted, "--model", str(gguf_path()))
    try:
        up.until("Stop with Ctrl-C.")
        yield up
        assert up.end(signal.SIGINT) == 0
    finally:
        if up.process.poll() is None:
            up.end(signal.SIGKILL)


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    path: dict[str, Any]


async def stream(
    up: Up, question: str, n_tokens: int, begun: asyncio.Event | None = None
) -> Answer:
    """One streamed answer over a connection of its own; raises if it is not whole."""
    body = {
        "model": gguf_path().stem,
        "messages": [SYSTEM, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, finish, usage = "", None, None
    async with (
        httpx.AsyncClient(base_url=up.base_url, timeout=300) as client,
        client.stream("POST", "/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                if text and begun is not None:
                    begun.set()
                finish = choice["finish_reason"] or finish
            usage = chunk["usage"] or usage
    assert finish == "length"
    assert usage is not None
    return Answer(text, usage["completion_tokens"], usage["diptych"])


@pytest.fixture(scope="module")
def undisturbed(up: Up) -> dict[str, str]:
    """Every question's longest answer when it is the only one."""
    return {q: asyncio.run(stream(up, q, LONGEST)).text for q in QUESTIONS}


async def run(up: Up, *arguments: str) -> str:
    """A command beside the streams; gives what it printed."""
    out, _ = await asyncio.to_thread(up.run, *arguments)
    return out


class Load:
    """Streams that go on while something happens."""

    def __init__(self, up: Up, undisturbed: dict[str, str], n_tokens: int) -> None:
        self._up = up
        self._undisturbed = undisturbed
        self._n_tokens = n_tokens
        self._running: list[tuple[str, asyncio.Task[Answer]]] = []
        self._begun: list[asyncio.Event] = []

    def add(self, n_streams: int) -> None:
        for number in range(n_streams):
            question = QUESTIONS[number % len(QUESTIONS)]
            self._begun.append(begun := asyncio.Event())
            task = asyncio.create_task(stream(self._up, question, self._n_tokens, begun))
            task.add_done_callback(lambda _, begun=begun: begun.set())
            self._running.append((question, task))

    async def begun(self) -> None:
        """Wait until every answer has begun."""
        async with asyncio.timeout(240):
            for begun in self._begun:
                await begun.wait()

    async def whole(self) -> list[Answer]:
        """Every answer, each as long and as worded as if it had been alone."""
        answers = await asyncio.gather(*(task for _, task in self._running))
        for (question, _), answer in zip(self._running, answers, strict=True):
            assert answer.tokens == self._n_tokens
            expected = self._undisturbed[question]
            assert answer.text == expected[: len(answer.text)]
            assert self._n_tokens < LONGEST or answer.text == expected
        return answers


@contextmanager
def tapped(up: Up) -> Iterator[list[str]]:
    """The lines of a tap on all requests, as they come."""
    lines: list[str] = []
    with up.start("tap", "request.>", "--port", str(up.port)) as tap:
        assert tap.stdout is not None
        reading = threading.Thread(target=lines.extend, args=(tap.stdout,))
        reading.start()
        try:
            yield lines
        finally:
            tap.kill()
            reading.join()


def sent(lines: list[str], *, max_tokens: int) -> list[dict[str, Any]]:
    requests = [json.loads(line) for line in lines if line.endswith("\n")]
    mine = (r for r in requests if r["message"]["stopping"]["max_tokens"] == max_tokens)
    # A gateway that hears no acknowledgement stores the same one again.
    return list({r["message"]["request_id"]: r for r in mine}.values())


async def test_many_streams_spread_over_workers_and_gateways(
    up: Up, undisturbed: dict[str, str]
) -> None:
    with tapped(up) as seen:
        while not seen:  # until it listens
            await stream(up, QUESTIONS[0], 1)
        load = Load(up, undisturbed, 8)
        load.add(32)
        answers = await load.whole()
        async with asyncio.timeout(60):
            while len(requests := sent(seen, max_tokens=8)) < 32:
                await asyncio.sleep(0.05)
    for role, count in (("prefill_worker", 2), ("decode_worker", 3)):
        carried = Counter(answer.path[role] for answer in answers)
        assert len(carried) == count
        # Two schedulers choose at once, by loads told a moment ago: even is 32 / count.
        assert min(carried.values()) >= 8 / count, carried
    assert len(requests) == 32
    assert len({request["message"]["gateway"] for request in requests}) == 2
    assert {request["type"] for request in requests} == {"request.1"}
    assert all(request["message"]["prompt_ids"].endswith("ids>") for request in requests)


async def test_decode_workers_come_and_go_under_load(up: Up, undisturbed: dict[str, str]) -> None:
    await run(up, "scale", "decode", "1")
    load = Load(up, undisturbed, LONGEST)
    load.add(8)
    told = await run(up, "scale", "decode", "3")
    assert told == "decode: 3 running (decode-worker, decode-worker-2, decode-worker-3)\n"
    seen: set[str] = set()
    async with asyncio.timeout(120):  # a scheduler hears of new workers by their beats
        while len(seen) < 3:
            seen.add((await stream(up, QUESTIONS[0], 2)).path["decode_worker"])
    load.add(8)
    await load.begun()
    assert await run(up, "scale", "decode", "1") == "decode: 1 running (decode-worker)\n"
    answers = await load.whole()
    assert len({answer.path["decode_worker"] for answer in answers}) > 1
    # A worker that drains finishes what it has; only what was just on its way goes elsewhere.
    assert max(answer.path["attempt"] for answer in answers) <= 2


async def test_every_other_service_comes_and_goes_under_load(
    up: Up, undisturbed: dict[str, str]
) -> None:
    load = Load(up, undisturbed, 24)
    for service, count in (("gateways", "1"), ("schedulers", "1"), ("prefill", "0")):
        load.add(4)
        await load.begun()
        await run(up, "scale", service, count)
    load.add(4)
    for service, count in (("gateways", "2"), ("schedulers", "2"), ("prefill", "2")):
        await run(up, "scale", service, count)
        load.add(4)
    answers = await load.whole()
    assert {answer.path["mode"] for answer in answers} == {"local", "remote"}


def told_by(up: Up, holds: Callable[[str], bool], *arguments: str) -> None:
    """A command says what `holds`: it looks for a second, in which not everybody may be heard."""
    give_up_s = time.monotonic() + 120
    while not holds(out := up.run(*arguments)[0]):
        assert time.monotonic() < give_up_s, out
        time.sleep(0.2)


def test_each_command_once(up: Up) -> None:
    said, told = up.run("chat", "--temperature", "0", "What is the capital of France?")
    assert "Paris" in said
    assert "tokens/s" in told
    assert "remote · prefill-worker-" in told

    for words in (*(f"{service}-" for service in SERVICES), "0 queued"):
        told_by(up, lambda out, words=words: words in out, "top", "--once")

    def released(out: str) -> bool:
        workers = json.loads(out)["workers"]
        decode = [w for w in workers if w["worker"].startswith("decode-worker-")]
        return [w["transfers"][0]["state"] for w in decode if w["transfers"]] == ["released"]

    told_by(up, released, "kv", "--json", "--ended", "1")
    told_by(up, lambda out: "of 160 slots in use" in out, "kv")

    (line, _) = up.run("tap", "load.*", "--count", "1")
    assert json.loads(line)["type"] == "worker_load.1"


def test_what_cannot_be_is_one_line(up: Up) -> None:
    assert up.run("scale", "decode", "0", code=1)[1].count("\n") == 1
    free = str(up.port + 1)
    for command in (("top", "--once"), ("kv",), ("tap",), ("scale", "decode", "2"), ("chat", "hi")):
        _, told = up.run(*command, "--port", free, code=1)
        assert told.startswith(f"diptych: no stack runs on port {free}; start one: diptych up")
        assert told.count("\n") == 1
    _, told = up.run("up", "--port", str(up.port), code=1)
    assert told.startswith(f"diptych: cannot listen on 127.0.0.1:{up.port}")
