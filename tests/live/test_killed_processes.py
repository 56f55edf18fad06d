"""Real processes killed by real signals, on real weights: the text must not notice."""

import asyncio
import signal
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack, Process

pytestmark = pytest.mark.live

TRIES = 6
"""Who does not come to run for a while strikes when the stream is over."""
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
        async with asyncio.timeout(120):
            while self.chunks < chunks:
                self.grown.clear()
                await self.grown.wait()


def client_of(stack: LiveStack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=240)


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


async def test_a_killed_decode_worker_is_replaced_in_mid_stream(
    own_stack: LiveStack, own_client: openai.AsyncOpenAI
) -> None:
    undisturbed = await Streamed(own_client).run()
    for _ in range(TRIES):
        own_stack.start("decode-worker")
        await asyncio.to_thread(own_stack.of("decode-worker").wait_ready)
        await asyncio.to_thread(own_stack.wait_for_model)
        streamed = Streamed(own_client)
        running = asyncio.create_task(streamed.run())
        await streamed.until(20)
        victim = await decoding(own_stack)
        if victim is not None:
            name = victim.incarnation
            victim.kill()
        await running
        assert streamed.text == undisturbed.text
        if streamed.told["attempt"] != 1:
            break
    assert streamed.told["attempt"] == 2
    assert streamed.told["decode_worker"] != name


async def decoding(stack: LiveStack) -> Process | None:
    """The decode worker whose own metrics show a running sequence."""
    async with httpx.AsyncClient(timeout=60) as http:
        for worker in stack.processes:
            if worker.service == "decode-worker" and worker.popen.poll() is None:
                answer = await http.get(f"http://127.0.0.1:{worker.health_port}/metrics")
                lines = answer.text.splitlines()
                line = next(li for li in lines if li.startswith("vllm:num_requests_running"))
                if float(line.rsplit(" ", 1)[1]) > 0:
                    return worker
    return None


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
    for _ in range(TRIES):
        streamed = Streamed(client)
        running = asyncio.create_task(streamed.run())
        await streamed.until(20)
        frozen = stack.of("decode-worker")
        frozen.signal(signal.SIGSTOP)
        await streamed.until(60)
        frozen.signal(signal.SIGCONT)
        await running
        assert streamed.text == undisturbed
        if streamed.told["attempt"] != 1:
            break
        await asyncio.to_thread(stack.wait_for_model)
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
