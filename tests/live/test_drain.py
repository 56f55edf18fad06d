"""A gateway that is asked to stop: what it has begun it finishes."""

import asyncio
import signal

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = pytest.mark.live


async def test_a_stream_in_flight_at_sigterm_is_finished(own_stack: LiveStack) -> None:
    await asyncio.to_thread(own_stack.start_all)
    gateway = own_stack.of("gateway")
    chunks, finish = 0, None
    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=60
    ) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Write a long story about a lighthouse keeper."}],
            temperature=0,
            max_tokens=40,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            chunks += 1
            if chunks == 2:
                gateway.signal(signal.SIGTERM)
            finish = chunk.choices[0].finish_reason
    assert finish == "length"
    assert await asyncio.to_thread(gateway.popen.wait, 15) == 0
