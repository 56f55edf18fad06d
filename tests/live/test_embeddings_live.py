"""The stock client's embeddings, against processes and real weights."""

import asyncio
import signal
from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from diptych_testkit.live_model import codec
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

TEXTS = [
    "The cat sat on the mat.",
    "A kitten was sitting on a rug.",
    "Quarterly revenue grew by nine percent.",
]
QUESTION: list[Any] = [{"role": "user", "content": "Tell me about lighthouses."}]


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0) as client:
        yield client


async def vectors(client: openai.AsyncOpenAI, given: Any, **more: Any) -> list[Any]:
    answer = await client.embeddings.create(model=MODEL, input=given, **more)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [numbers(one.embedding) for one in answer.data]


def numbers(given: Any) -> Any:
    """What the client decodes by itself only where it chose base64 by itself."""
    return np.frombuffer(b64decode(given), "<f4") if isinstance(given, str) else np.float32(given)


async def test_the_stock_client_gets_vectors(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model=MODEL, input=TEXTS)
    ids = [codec().encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    cat, kitten, revenue = (np.float32(one.embedding) for one in answer.data)
    assert np.linalg.norm(cat) == pytest.approx(1)
    assert cat @ kitten > cat @ revenue + 0.1
    for more in ({"encoding_format": "float"}, {"encoding_format": "base64"}, {}):
        again = await vectors(client, ids, **more)
        assert np.array_equal(again, [cat, kitten, revenue])
    assert np.array_equal((await vectors(client, TEXTS[0]))[0], cat)


async def test_a_text_too_long_is_named(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await vectors(client, ["fine", "much too long " * 3000])
    assert (bad.value.param, bad.value.code) == ("input[1]", "context_length_exceeded")


async def chat(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=48, stream=True
    )
    parts = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
    return "".join(part or "" for part in parts)


async def test_a_stream_beside_64_requests_says_what_it_says_alone(
    client: openai.AsyncOpenAI,
) -> None:
    alone, known = await chat(client), (await vectors(client, TEXTS[1]))[0]
    crowd = [asyncio.create_task(vectors(client, TEXTS[n % 3])) for n in range(64)]
    assert await chat(client) == alone
    found = await asyncio.gather(*crowd)
    assert all(np.array_equal(found[n][0], known) for n in range(1, 64, 3))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_workers_texts_are_computed_by_another(
    stack: LiveStack, client: openai.AsyncOpenAI, number: signal.Signals
) -> None:
    given = [[1 + n] * 60 for n in range(8)]
    before = await vectors(client, given)
    asking = asyncio.create_task(vectors(client, given))
    await asyncio.sleep(0.5)
    lost = stack.of("prefill-worker")
    lost.signal(number)
    after = await asking
    assert np.array_equal(before, after)
    if number == signal.SIGSTOP:
        lost.kill()
    stack.start("prefill-worker").wait_ready()
