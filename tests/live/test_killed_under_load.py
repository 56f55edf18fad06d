"""One process after another is killed under eight streams: none hangs, no text changes."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

STREAMS = 8
TOKENS = 48
QUESTIONS = [f"Write a long story about number {number}." for number in range(STREAMS)]


@pytest.fixture
async def client(own_stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    await asyncio.to_thread(own_stack.start_all)
    second = own_stack.start("decode-worker")
    await asyncio.to_thread(second.wait_ready)
    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


async def stream(client: openai.AsyncOpenAI, question: str, started: asyncio.Event) -> str:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
    )
    text, finished = "", None
    async for chunk in answer:
        started.set()
        text += chunk.choices[0].delta.content or ""
        finished = chunk.choices[0].finish_reason or finished
    assert finished in ("stop", "length"), "a stream broke off without a word"
    return text


async def all_streams(
    client: openai.AsyncOpenAI, started: list[asyncio.Event]
) -> list[str | BaseException]:
    streams = (stream(client, q, s) for q, s in zip(QUESTIONS, started, strict=True))
    async with asyncio.timeout(120):
        return await asyncio.gather(*streams, return_exceptions=True)


@pytest.mark.parametrize(
    "victim", ["prefill-worker", "decode-worker", "scheduler", "power-governor", "nats", "gateway"]
)
async def test_no_stream_hangs_and_no_text_changes(
    victim: str, own_stack: LiveStack, client: openai.AsyncOpenAI
) -> None:
    undisturbed = await all_streams(client, [asyncio.Event() for _ in QUESTIONS])
    started = [asyncio.Event() for _ in QUESTIONS]
    running = asyncio.create_task(all_streams(client, started))
    async with asyncio.timeout(60):
        await started[0].wait()
    if victim == "nats":
        await asyncio.to_thread(own_stack.nats.kill_blocking)
        await asyncio.to_thread(own_stack.nats.start_blocking)
    else:
        own_stack.of(victim).kill()
    if victim == "scheduler":
        own_stack.start("scheduler")
    answers = await running
    if victim == "gateway":
        assert all(isinstance(answer, Exception) for answer in answers)
    else:
        assert answers == undisturbed
