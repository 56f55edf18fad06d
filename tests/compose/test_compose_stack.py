"""The shipped compose file on a real engine: see infra/ci/compose.sh.

The tests run in order on one project: built, started, scaled, signalled, removed. Its images stay,
so that the next run is quick.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych_testkit.compose_stack import ComposeFailed, ComposeStack, Container, no_engine

NO_ENGINE = no_engine()
pytestmark = [
    pytest.mark.compose,
    pytest.mark.skipif(bool(NO_ENGINE), reason=NO_ENGINE),
    pytest.mark.timeout(2400),
]
MODEL = "smollm2-135m"
SERVICES = (
    *("nats", "supervisor", "prefill-worker", "decode-worker", "scheduler", "power-governor"),
    "gateway",
)


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    stack = ComposeStack()
    try:
        stack.down()
        stack.build()
        stack.up()
        yield stack
    finally:
        stack.down()


class Streamed:
    """One streamed answer."""

    def __init__(self, stack: ComposeStack, text: str, max_tokens: int) -> None:
        self.said = ""
        self.chunks = 0
        self.completion_tokens = 0
        self.told: dict[str, Any] = {}
        self._asked = {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": text},
            ],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._base_url = stack.base_url

    async def run(self, **extra: object) -> "Streamed":
        async with openai.AsyncOpenAI(
            base_url=self._base_url, api_key="none", max_retries=0, timeout=240
        ) as client:
            stream = await client.chat.completions.create(**self._asked, extra_body=extra)  # type: ignore[call-overload]
            async for chunk in stream:
                if chunk.choices:
                    self.said += chunk.choices[0].delta.content or ""
                    self.chunks += 1
                if chunk.usage:
                    self.completion_tokens = chunk.usage.completion_tokens
                    self.told = chunk.usage.model_extra["diptych"]
        return self

    async def until(self, chunks: int) -> None:
        async with asyncio.timeout(180):
            while self.chunks < chunks:
                await asyncio.sleep(0.02)


async def ask(stack: ComposeStack, text: str, max_tokens: int) -> Streamed:
    return await Streamed(stack, text, max_tokens).run()


def running(stack: ComposeStack, worker: Container) -> float:
    """Sequences that a worker's own metrics show."""
    page = "http://127.0.0.1:8081/metrics"
    script = f"import urllib.request as r; print(r.urlopen({page!r}, timeout=30).read().decode())"
    index = f"--index={worker.number}"
    metrics = stack.run("exec", "--no-TTY", index, worker.service, "python", "-c", script)
    lines = metrics.splitlines()
    line = next(line for line in lines if line.startswith("vllm:num_requests_running"))
    return float(line.rsplit(" ", 1)[1])


async def busy_decode_worker(stack: ComposeStack) -> Container | None:
    """One with a stream. All are asked at once: each look into a container takes a while."""
    workers = await asyncio.to_thread(stack.of, "decode-worker")
    looks = (asyncio.to_thread(running, stack, worker) for worker in workers)
    busy = [w for w, n in zip(workers, await asyncio.gather(*looks), strict=True) if n]
    return busy[0] if busy else None


class Stories:
    """Three long answers at once."""

    def __init__(self, stack: ComposeStack, length: int) -> None:
        text = "Write a long story about the sea."
        self.streams = [Streamed(stack, text, length) for _ in range(3)]
        self._tasks = [asyncio.create_task(s.run(ignore_eos=True)) for s in self.streams]

    async def begun(self) -> None:
        for stream in self.streams:
            await stream.until(2)

    async def ended(self) -> None:
        async with asyncio.timeout(300):
            await asyncio.gather(*self._tasks)


async def while_it_streams(stack: ComposeStack, length: int) -> tuple[Stories, Container]:
    """Stories, and a worker that was seen at work on one of them."""
    for _ in range(5):
        stories = Stories(stack, length)
        await stories.begun()
        if (busy := await busy_decode_worker(stack)) is not None:
            return stories, busy
        await stories.ended()
    raise AssertionError("each time the streams were over before anybody was asked")


async def test_an_answer_streams_through_the_published_port(stack: ComposeStack) -> None:
    answer = await ask(stack, "What is the capital of France?", 24)
    assert "Paris" in answer.said
    assert answer.told["mode"] == "remote"
    assert answer.told["link"] == "shm"
    assert answer.told["attempt"] == 1


async def test_kv_crosses_between_containers_by_tcp_too(stack: ComposeStack) -> None:
    forced = {"mode": "remote", "link": "tcp"}
    answer = await Streamed(stack, "What is the capital of France?", 24).run(diptych=forced)
    assert "Paris" in answer.said
    assert answer.told["link"] == "tcp"
    assert answer.told["attempt"] == 1


def test_everything_is_up_and_the_weights_were_fetched_once(stack: ComposeStack) -> None:
    found = stack.containers()
    assert {c.service for c in found if c.state == "running"} == set(SERVICES)
    assert [(c.state, c.exit_code) for c in found if c.service == "models"] == [("exited", 0)]
    assert "is here" in stack.run("run", "--rm", "models")


USERS = """
from pathlib import Path
for process in Path("/proc").glob("[0-9]*"):
    words = (process / "cmdline").read_bytes().split(bytes(1))
    module = words[2] if len(words) > 2 and words[1] == b"-m" else b""
    if module.startswith(b"diptych_") and not module.endswith(b".enter"):
        status = (process / "status").read_text()
        print(status.partition("Uid:")[2].split()[0])
"""


def test_services_run_as_nobody_in_particular(stack: ComposeStack) -> None:
    """What issues their identities is root; it serves nothing."""
    for service in SERVICES[1:]:
        told = stack.run("exec", "--no-TTY", service, "python", "-c", USERS)
        assert told.split() == ["10001"], service


async def test_three_decode_workers_share_the_load(stack: ComposeStack) -> None:
    await asyncio.to_thread(stack.up, "--scale", "decode-worker=3")
    workers = await asyncio.to_thread(stack.of, "decode-worker")
    known = {await asyncio.to_thread(stack.incarnation, worker) for worker in workers}
    assert len(known) == 3
    answers = await asyncio.gather(*(ask(stack, f"Count to {n}.", 32) for n in range(6)))
    served = Counter(answer.told["decode_worker"] for answer in answers)
    assert set(served) <= known
    assert len(served) >= 2, served
    assert {answer.told["mode"] for answer in answers} == {"remote"}


async def test_a_worker_that_is_asked_to_stop_finishes_its_streams(stack: ComposeStack) -> None:
    length = 250  # longer than a look into a container, and shorter than the drain may take
    stories, busy = await while_it_streams(stack, length)
    victim = await asyncio.to_thread(stack.incarnation, busy)
    await asyncio.to_thread(stack.signal, busy, "SIGTERM")
    await stories.ended()
    streams = stories.streams
    assert [stream.completion_tokens for stream in streams] == [length] * 3
    assert {stream.told["attempt"] for stream in streams} == {1}
    assert victim in {stream.told["decode_worker"] for stream in streams}
    ended = await asyncio.to_thread(stack.gone, busy)
    assert ended.exit_code == 0
    after = await ask(stack, "Hello", 8)
    assert after.told["decode_worker"] != victim


async def test_a_killed_worker_comes_back(stack: ComposeStack) -> None:
    container = (await asyncio.to_thread(stack.of, "prefill-worker"))[0]
    before = await asyncio.to_thread(stack.incarnation, container)
    crash = "import os; os.kill(-1, 9)"
    with suppress(ComposeFailed):  # the container's end may take the killer with it
        await asyncio.to_thread(
            stack.run, "exec", "--no-TTY", "prefill-worker", "python", "-c", crash
        )
    await asyncio.to_thread(stack.up, "--scale", "decode-worker=3")
    assert await asyncio.to_thread(stack.incarnation, container) != before
    async with asyncio.timeout(120):  # a scheduler hears of it by its beats
        while (await ask(stack, "Hello again", 8)).told["mode"] != "remote":
            await asyncio.sleep(0.5)


def test_weights_of_ones_own_are_taken_from_a_folder(stack: ComposeStack, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    own = stack.told(DIPTYCH_MODELS=str(tmp_path), DIPTYCH_WEIGHTS="mine.gguf")
    with pytest.raises(ComposeFailed, match=r"mine\.gguf is not in the models folder"):
        own.run("run", "--rm", "--no-deps", "models")
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    (tmp_path / "mine.gguf").chmod(0o644)
    assert "mine.gguf is here" in own.run("run", "--rm", "--no-deps", "models")


def test_nothing_is_left_behind(stack: ComposeStack) -> None:
    assert stack.leftovers() != []
    stack.down()
    assert stack.leftovers() == []
