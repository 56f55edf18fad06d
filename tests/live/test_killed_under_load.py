"""One process after another is killed under eight streams: none hangs, no text changes."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

STREAMS = 8
TOKENS = 48
QUESTIONS = [f"Write a long story about number {number}." for number in range(STREAMS)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """One of each and a second decode worker; a test puts another in its victim's place."""
    live = LiveStack(tmp_path_factory.mktemp("stack"), patient=True)
    try:
        live.start_all()
        live.start("decode-worker").wait_ready()
        yield live
    finally:
        live.close()


def client_of(stack: LiveStack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=240)


@pytest.fixture(scope="module")
def undisturbed(stack: LiveStack) -> list[str | BaseException]:
    """Every question's answer while nobody is killed."""

    async def ask() -> list[str | BaseException]:
        async with client_of(stack) as client:
            return await all_streams(client, [asyncio.Event() for _ in QUESTIONS])

    return asyncio.run(ask())


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
    async with asyncio.timeout(300):
        return await asyncio.gather(*streams, return_exceptions=True)


@pytest.mark.parametrize(
    "victim", ["prefill-worker", "decode-worker", "scheduler", "power-governor", "nats", "gateway"]
)
async def test_no_stream_hangs_and_no_text_changes(
    victim: str, stack: LiveStack, undisturbed: list[str | BaseException]
) -> None:
    async with client_of(stack) as client:
        started = [asyncio.Event() for _ in QUESTIONS]
        running = asyncio.create_task(all_streams(client, started))
        async with asyncio.timeout(120):
            begun = [asyncio.create_task(one.wait()) for one in started]
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        kill(stack, victim)
        answers = await running
        for task in begun:
            task.cancel()
    whole = [answer == expected for answer, expected in zip(answers, undisturbed, strict=True)]
    if victim == "gateway":  # an answer is whole, or its client is told that it is not
        assert not all(whole)
        assert all(isinstance(a, Exception) for a, w in zip(answers, whole, strict=True) if not w)
    else:
        assert all(whole), answers
    make_whole(stack, victim)


def kill(stack: LiveStack, victim: str) -> None:
    if victim == "nats":
        stack.nats.kill_blocking()
        stack.nats.start_blocking()
    else:
        stack.of(victim).kill()
    if victim == "scheduler":
        stack.start(victim)


def make_whole(stack: LiveStack, victim: str) -> None:
    if victim not in ("nats", "scheduler"):
        stack.start(victim)
    if victim != "nats":
        stack.of(victim).wait_ready()
    stack.wait_for_model()
