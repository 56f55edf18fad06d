"""The stock `openai` client, unmodified."""

from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


async def test_the_stock_client_streams_asks_whole_and_reads_errors(stack: Any) -> None:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello world"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2

        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert whole.choices[0].message.content == "Hello world"
        assert whole._request_id

        models = await client.models.list()
        assert [model.id for model in models.data] == ["tiny"]

        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, n=9)
        assert bad.value.param == "n"


async def test_the_stock_client_creates_streams_retrieves_and_deletes_responses(stack: Any) -> None:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        whole = await client.responses.create(model="tiny", input="Hello", instructions="Be brief.")
        assert (whole.status, whole.output_text) == ("completed", "Hello world")

        stream = await client.responses.create(model="tiny", input="Hello", stream=True)
        events = [event async for event in stream]
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == "Hello world"
        assert events[-1].type == "response.completed"
        response_id = events[-1].response.id

        again = await client.responses.retrieve(response_id, stream=True, starting_after=4)
        assert [e.sequence_number async for e in again] == list(range(5, 10))
        assert (await client.responses.retrieve(response_id)).output_text == "Hello world"

        going_on = await client.responses.create(
            model="tiny", input="And?", previous_response_id=response_id
        )
        assert going_on.previous_response_id == response_id
        assert (await client.responses.cancel(whole.id)).status == "completed"

        await client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.retrieve(response_id)
        assert missing.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model="tiny", input="Hello", top_logprobs=21)
        assert bad.value.param == "top_logprobs"


async def test_the_stock_client_streams_over_a_websocket(stack: Any) -> None:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        async with client.responses.connect() as connection:
            previous: Any = openai.omit
            for turn in range(3):
                await connection.response.create(
                    model="tiny",
                    input=f"Turn {turn}",
                    store=turn == 2,
                    previous_response_id=previous,
                    stream_id="chat",
                )
                text = ""
                async for event in connection:
                    assert event.stream_id == "chat"
                    if event.type == "response.output_text.delta":
                        text += event.delta
                    if event.type == "response.completed":
                        previous = event.response.id
                        break
                assert text == "Hello world"
            await connection.response.create(model="nope", input="Hello")
            error = await connection.recv()
            assert error.type == "error"
        stored = await client.responses.retrieve(previous)
        assert stored.output_text == "Hello world"


async def test_the_stock_helper_that_collects_a_stream_works(stack: Any) -> None:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        async with client.responses.stream(model="tiny", input="Hello") as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert seen[-1] == "response.completed"
        assert final.output_text == "Hello world"
