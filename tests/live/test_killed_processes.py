"""Real processes killed by real signals, on real weights: the text must not notice."""

import asyncio
import signal
from collections.abc import AsyncIterator

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack, Process

pytestmark = pytest.mark.live

ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Write a long story about a lighthouse keeper."}],
    "temperature": 0,
    "max_tokens": 120,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class Streamed:
    """One stream: its text so far, and in the end its usage."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.text = ""
        self.chunks = 0
        self.told: dict[str, object] = {}
        self.grown = asyncio.Event()

    async def run(self) -> "Streamed":
        stream = await self._client.chat.completions.create(**ASKED)  # type: ignore[call-overload]
        async for chunk in stream:
            if chunk.choices:
                self.text += chunk.choices[0].delta.content or ""
                self.chunks += 1
                self.grown.set()
            elif chunk.usage:
                self.told = chunk.usage.model_extra["diptych"]
        return self

    async def until(self, chunks: int) -> None:
        async with asyncio.timeout(60):
            while self.chunks < chunks:
                self.grown.clear()
                await self.grown.wait()


def client_of(stack: LiveStack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=90)


@pytest.fixture
async def own_client(own_stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    await asyncio.to_thread(own_stack.start_all)
    async with client_of(own_stack) as client:
        yield client


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(stack) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(stack: LiveStack) -> str:
    """The answer while nobody is killed."""

    async def ask() -> str:
        async with client_of(stack) as client:
            return (await Streamed(client).run()).text

    return asyncio.run(ask())


def serving(stack: LiveStack, told: dict[str, object]) -> Process:
    """The decode worker that a usage block names."""
    workers = [p for p in stack.processes if p.service == "decode-worker"]
    return next(p for p in workers if p.incarnation == told["decode_worker"])


async def test_a_killed_decode_worker_is_replaced_in_mid_stream(
    own_stack: LiveStack, own_client: openai.AsyncOpenAI
) -> None:
    undisturbed = await Streamed(own_client).run()
    second = own_stack.start("decode-worker")
    await asyncio.to_thread(second.wait_ready)
    streamed = Streamed(own_client)
    running = asyncio.create_task(streamed.run())
    await streamed.until(20)
    victim = serving(own_stack, undisturbed.told)
    if not await is_decoding(victim):
        victim = second
    victim.kill()
    await running
    assert streamed.text == undisturbed.text
    assert streamed.told["attempt"] == 2
    assert streamed.told["decode_worker"] != undisturbed.told["decode_worker"] or victim is second


async def is_decoding(worker: Process) -> bool:
    """Whether the worker's own metrics show a running sequence."""
    import httpx

    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"http://127.0.0.1:{worker.health_port}/metrics")
    line = next(li for li in answer.text.splitlines() if li.startswith("vllm:num_requests_running"))
    return float(line.rsplit(" ", 1)[1]) > 0


async def test_the_last_worker_serves_alone(
    own_stack: LiveStack, own_client: openai.AsyncOpenAI
) -> None:
    undisturbed = await Streamed(own_client).run()
    own_stack.of("decode-worker").kill()
    alone = await Streamed(own_client).run()
    assert alone.text == undisturbed.text
    assert alone.told["mode"] == "local"


@pytest.mark.parametrize("service", ["prefill-worker", "scheduler", "power-governor"])
async def test_a_stream_that_is_decoding_does_not_need_the_others(
    service: str, stack: LiveStack, client: openai.AsyncOpenAI, undisturbed: str
) -> None:
    streamed = Streamed(client)
    running = asyncio.create_task(streamed.run())
    await streamed.until(20)
    stack.of(service).kill()
    await running
    assert streamed.text == undisturbed
    assert streamed.told["attempt"] == 1
    await asyncio.to_thread(stack.start(service).wait_ready)
    await asyncio.to_thread(stack.wait_for_model)


async def test_a_frozen_decode_worker_is_fenced_and_forgotten(
    stack: LiveStack, client: openai.AsyncOpenAI, undisturbed: str
) -> None:
    streamed = Streamed(client)
    running = asyncio.create_task(streamed.run())
    await streamed.until(20)
    frozen = stack.of("decode-worker")
    frozen.signal(signal.SIGSTOP)
    await streamed.until(60)
    frozen.signal(signal.SIGCONT)
    await running
    assert streamed.text == undisturbed
    assert streamed.told["mode"] == "local"


async def test_a_restarted_nats_server_loses_no_token(
    stack: LiveStack, client: openai.AsyncOpenAI, undisturbed: str
) -> None:
    streamed = Streamed(client)
    running = asyncio.create_task(streamed.run())
    await streamed.until(20)
    await asyncio.to_thread(stack.nats.kill_blocking)
    await asyncio.to_thread(stack.nats.start_blocking)
    await running
    assert streamed.text == undisturbed
    assert streamed.told["attempt"] == 1
    assert (await Streamed(client).run()).text == undisturbed
