"""NATS and each service frozen and thawed under load: nobody alive is fenced, no text changes."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from diptych_bus.jetstream.answers import api
from diptych_contracts.streams import SCHEDULERS
from diptych_testkit.live_stack import MODEL, LiveStack, Process
from diptych_testkit.ports import free_port

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

STREAMS = 8
TOKENS = 48
OUTLASTING_TOKENS = 320
"""More than are made until a dead scheduler is missed."""
QUESTIONS = [f"Write a long story about number {number}." for number in range(STREAMS)]
RESUME = {"x-diptych-resume": "1"}
"""A frozen gateway is as good as dead: without this its requests are cancelled."""


class Answer(NamedTuple):
    text: str
    attempt: int


@asynccontextmanager
async def clients(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=base_url,
        api_key="none",
        max_retries=0,
        timeout=240,
        default_headers=RESUME,
    ) as client:
        yield client


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """Two of everything but governor and gateway; every test leaves it whole."""
    live = LiveStack(tmp_path_factory.mktemp("stack"), patient=True)
    try:
        live.start_all()
        for process in [live.start(s) for s in ("scheduler", "prefill-worker", "decode-worker")]:
            process.wait_ready()
        yield live
    finally:
        live.close()


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with clients(stack.base_url) as client:
        yield client


@pytest.fixture(scope="module")
def expected(stack: LiveStack) -> list[str]:
    """Every question's answer while nothing is frozen."""

    async def ask() -> list[str]:
        async with clients(stack.base_url) as client:
            return texts(await Load(client).answers())

    return asyncio.run(ask())


async def stream(
    client: openai.AsyncOpenAI, question: str, begun: asyncio.Event, n_tokens: int = TOKENS
) -> Answer:
    chunks = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=n_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, attempt = "", 0
    async for chunk in chunks:
        begun.set()
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        if chunk.usage is not None:
            told: Any = chunk.usage.model_extra
            attempt = told["diptych"]["attempt"]
    assert attempt, "a stream broke off without a word"
    return Answer(text, attempt)


class Load:
    """Streams that are running."""

    def __init__(self, client: openai.AsyncOpenAI, n_tokens: int = TOKENS) -> None:
        self._begun = [asyncio.Event() for _ in QUESTIONS]
        self._tasks = [
            asyncio.create_task(stream(client, question, begun, n_tokens))
            for question, begun in zip(QUESTIONS, self._begun, strict=True)
        ]

    async def begun(self, count: int = STREAMS // 2) -> None:
        """Wait until `count` streams have brought something."""
        async with asyncio.timeout(120):
            while sum(begun.is_set() for begun in self._begun) < count:
                await asyncio.wait(
                    [asyncio.ensure_future(b.wait()) for b in self._begun if not b.is_set()],
                    return_when=asyncio.FIRST_COMPLETED,
                )

    async def answers(self) -> list[Answer]:
        """Every answer."""
        async with asyncio.timeout(240):
            return await asyncio.gather(*self._tasks)

    async def one_is_over(self) -> None:
        """Wait until one stream has ended, or was refused."""
        await asyncio.wait(self._tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)

    async def outcomes(self) -> list[Answer | BaseException]:
        """Every answer, or what came instead."""
        async with asyncio.timeout(240):
            return await asyncio.gather(*self._tasks, return_exceptions=True)


def texts(answers: Sequence[Answer]) -> list[str]:
    return [answer.text for answer in answers]


class Said:
    """What schedulers have logged since it was made."""

    def __init__(self, stack: LiveStack) -> None:
        self._stack = stack
        self._begins = {p.log: p.log.stat().st_size for p in stack.processes}

    def of(self, event: str) -> list[dict[str, Any]]:
        """The lines of one name."""
        logs = [p.log for p in self._stack.processes if p.service == "scheduler"]
        lines = b"\n".join(log.read_bytes()[self._begins.get(log, 0) :] for log in logs)
        named = f'"{event}"'.encode()
        whole = (line for line in lines.splitlines() if line.endswith(b"}"))
        return [json.loads(line) for line in whole if named in line]


@pytest.fixture
def said(stack: LiveStack) -> Said:
    return Said(stack)


async def metric(process: Process, name: str) -> float:
    async with httpx.AsyncClient(timeout=60) as http:
        page = await http.get(f"http://127.0.0.1:{process.health_port}/metrics")
    lines = [line for line in page.text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def nothing_is_held(stack: LiveStack, within_s: float = 60.0) -> None:
    """No worker has a sequence or a promised KV cell, and no scheduler owns a request."""

    async def held() -> float:
        total = 0.0
        for process in stack.processes:
            if process.popen.poll() is None and process.service.endswith("worker"):
                total += await metric(process, "vllm:num_requests_")
                total += await metric(process, "vllm:kv_cache_usage_perc")
            elif process.popen.poll() is None and process.service == "scheduler":
                total += await metric(process, "diptych_scheduler_owned_requests")
        return total

    async with asyncio.timeout(within_s):
        while await held() > 0:
            await asyncio.sleep(0.2)


@asynccontextmanager
async def frozen(process: Process) -> AsyncIterator[None]:
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


async def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("seconds", [1, 2, 3, 5])
async def test_nobody_is_fenced_while_nats_is_frozen(
    seconds: int, stack: LiveStack, client: openai.AsyncOpenAI, expected: list[str], said: Said
) -> None:
    """Also not where a job was just being sent: some streams have not begun yet."""
    load = Load(client)
    await load.begun(1)
    stack.nats.freeze()
    await asyncio.sleep(seconds)
    stack.nats.thaw()
    answers = await load.answers()
    assert texts(answers) == expected
    assert {answer.attempt for answer in answers} == {1}
    assert said.of("member_lost") == []
    await nothing_is_held(stack)


async def test_requests_that_come_while_nats_is_frozen_are_refused_or_served(
    stack: LiveStack, client: openai.AsyncOpenAI, expected: list[str]
) -> None:
    port = free_port()
    impatient = stack.start("gateway", PORT=str(port), ACCEPT_S="2")
    await asyncio.to_thread(impatient.wait_ready)
    async with clients(f"http://127.0.0.1:{port}/v1") as soon:
        stack.nats.freeze()
        load = Load(soon)
        await asyncio.sleep(3)
        await load.one_is_over()
        stack.nats.thaw()
        refused = 0
        for outcome, text in zip(await load.outcomes(), expected, strict=True):
            if isinstance(outcome, openai.APIStatusError):
                assert outcome.status_code == 503
                refused += 1
            else:
                assert isinstance(outcome, Answer), outcome
                assert outcome.text == text
    assert refused > 0
    await asyncio.to_thread(impatient.stop)
    assert texts(await Load(client).answers()) == expected
    await nothing_is_held(stack)


async def test_a_scheduler_frozen_for_ten_seconds_does_no_harm(
    stack: LiveStack, client: openai.AsyncOpenAI, expected: list[str], said: Said
) -> None:
    load = Load(client)
    await load.begun()
    victim = stack.of("scheduler")
    incarnation = victim.incarnation
    async with frozen(victim):
        await eventually(lambda: bool(said.of("member_lost")))
        assert texts(await load.answers()) == expected
        during = Load(client)
        await asyncio.sleep(8)
    answers = await during.answers()
    assert texts(answers) == expected
    assert {answer.attempt for answer in answers} == {1}
    lost = {(line["incarnation"], line["member"]) for line in said.of("member_lost")}
    assert {member for _, member in lost} == {incarnation}
    adopted = Counter(line["request_id"] for line in said.of("request_adopted"))
    assert set(adopted.values()) <= {1}
    assert texts(await Load(client).answers()) == expected
    await asyncio.to_thread(victim.wait_ready)
    await nothing_is_held(stack)


async def test_a_frozen_scheduler_does_not_hoard_requests(tmp_path: Path) -> None:
    """Some came to the frozen one four times in a row, 6 s late: a fifth time is the last."""
    stack = LiveStack(tmp_path, engine="sim", patient=True)
    try:
        await asyncio.to_thread(stack.start_all)
        second = stack.start("scheduler")
        await asyncio.to_thread(second.wait_ready)
        async with clients(stack.base_url) as client, frozen(second):
            await asyncio.sleep(1.5)
            for number in range(12):
                async with asyncio.timeout(60):
                    await stream(client, f"Question {number}", asyncio.Event())
            assert 12 <= await deliveries(stack) < 12 + 6, "half, several times, if it hoards"
    finally:
        await asyncio.to_thread(stack.close)


async def deliveries(stack: LiveStack) -> int:
    """How often the schedulers were sent a request, the same one again counted again."""
    bus = await stack.join()
    try:
        name = f"CONSUMER.INFO.{SCHEDULERS.stream}.{SCHEDULERS.name}"
        told = await api(bus._connection, name, {}, timeout_s=60.0)
    finally:
        await bus.close()
    return int(told["delivered"]["consumer_seq"])


@pytest.mark.parametrize("service", ["decode-worker", "prefill-worker", "power-governor"])
async def test_a_frozen_service_that_thaws_serves_again(
    service: str, stack: LiveStack, client: openai.AsyncOpenAI, expected: list[str], said: Said
) -> None:
    load = Load(client)
    await load.begun()
    victim = stack.of(service)
    incarnation = victim.incarnation
    async with frozen(victim):
        await eventually(lambda: bool(said.of("member_lost")))
        assert texts(await load.answers()) == expected
    assert {line["member"] for line in said.of("member_lost")} == {incarnation}
    await eventually(lambda: bool(said.of("member_returned")))
    await nothing_is_held(stack)
    answers = await Load(client).answers()
    assert texts(answers) == expected
    assert {answer.attempt for answer in answers} == {1}


async def test_a_frozen_gateway_goes_on_with_its_streams(
    stack: LiveStack, client: openai.AsyncOpenAI, expected: list[str], said: Said
) -> None:
    load = Load(client)
    await load.begun()
    async with frozen(stack.of("gateway")):
        await eventually(lambda: bool(said.of("member_lost")))
        await asyncio.sleep(2)
    answers = await load.answers()
    assert texts(answers) == expected
    assert {answer.attempt for answer in answers} == {1}
    await nothing_is_held(stack)


async def test_of_two_schedulers_that_race_to_adopt_one_wins(
    stack: LiveStack, client: openai.AsyncOpenAI, expected: list[str], said: Said
) -> None:
    third = stack.start("scheduler")
    await asyncio.to_thread(third.wait_ready)
    load = Load(client, OUTLASTING_TOKENS)
    await load.begun()
    victim = next(p for p in stack.processes if p.service == "scheduler")
    victim.kill()
    answers = await load.answers()
    for text, begins in zip(texts(answers), expected, strict=True):
        assert text.startswith(begins)
    assert {answer.attempt for answer in answers} == {1}
    adopted = Counter(line["request_id"] for line in said.of("request_adopted"))
    assert set(adopted.values()) == {1}
    await nothing_is_held(stack)
