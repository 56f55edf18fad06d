"""Tools by the default model and the stock client: a loop, over chat and responses; and a death."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

TRIES = 6
"""Who does not come to run for a while strikes when the call is over."""
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Tells the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 40},
            "days": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 12},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: Any = [{"type": "function", **FUNCTION}]
QUESTION = "What is the weather in Paris?"
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
async def client(own_stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    await asyncio.to_thread(own_stack.start_all)
    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=240
    ) as client:
        yield client


async def test_a_loop_over_chat_and_one_over_responses(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    told: dict[str, Any] = {"model": MODEL, "temperature": 0, "tools": CHAT_TOOLS}
    first = await client.chat.completions.create(
        messages=messages, tool_choice="required", max_tokens=150, **told
    )
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    asked = json.loads(call.function.arguments)
    assert set(asked) == {"city", "days"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny"}'}
    messages += [choice.message.model_dump(exclude_none=True), result]
    second = await client.chat.completions.create(messages=messages, max_tokens=30, **told)
    assert second.choices[0].finish_reason in {"stop", "length", "tool_calls"}
    assert second.usage is not None
    assert second.usage.prompt_tokens > (first.usage.prompt_tokens if first.usage else 0)

    flat: dict[str, Any] = {"model": MODEL, "temperature": 0, "tools": FLAT_TOOLS}
    choice_of: Any = {"type": "function", "name": "get_weather"}
    response = await client.responses.create(input=QUESTION, tool_choice=choice_of, **flat)
    (item,) = response.output
    assert item.type == "function_call"
    assert set(json.loads(item.arguments)) == {"city", "days"}
    output: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    after = await client.responses.create(
        input=[output], previous_response_id=response.id, max_output_tokens=30, **flat
    )
    assert after.output


async def streamed(
    client: openai.AsyncOpenAI, begun: asyncio.Event | None = None
) -> tuple[str, str, int]:
    """The arguments of a call that is demanded, its finish, and the attempt that ended it."""
    arguments, finish, attempt, chunks = "", "", 0, 0
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=150,
        tools=CHAT_TOOLS,
        tool_choice=NAMED,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                arguments += (call.function.arguments if call.function else None) or ""
                chunks += 1
            finish = choice.finish_reason or finish
        if chunks >= 8 and begun is not None:
            begun.set()
        if chunk.usage:
            attempt = (chunk.usage.model_extra or {})["diptych"]["attempt"]
    return arguments, finish, attempt


async def test_a_worker_killed_within_arguments_changes_nothing(
    own_stack: LiveStack, client: openai.AsyncOpenAI
) -> None:
    undisturbed, finish, _ = await streamed(client)
    assert finish == "tool_calls"
    assert len(json.loads(undisturbed)["days"]) >= 8
    for _ in range(TRIES):
        begun = asyncio.Event()
        running = asyncio.create_task(streamed(client, begun))
        async with asyncio.timeout(120):
            await begun.wait()
        own_stack.of("decode-worker").kill()
        arguments, finish, attempt = await running
        assert (arguments, finish) == (undisturbed, "tool_calls")
        if attempt != 1:
            break
        await asyncio.to_thread(own_stack.start("decode-worker").wait_ready)
        await asyncio.to_thread(own_stack.wait_for_model)
    assert attempt == 2
