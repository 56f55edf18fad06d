"""`/v1/responses` on real weights and processes; a killed gateway costs its clients nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.ports import free_port

pytestmark = pytest.mark.live

ASKED: dict[str, Any] = {
    "model": MODEL,
    "input": "Write a long story about a lighthouse keeper.",
    "temperature": 0,
    "max_output_tokens": 120,
}


def client_of(base_url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=240)


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(stack.base_url) as made:
        yield made


class Read:
    """A stream of events, as far as it was read."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.text = ""
        self.last: Any = None

    async def take(self, events: Any, *, until: int | None = None) -> "Read":
        async for event in events:
            self.numbers.append(event.sequence_number)
            self.text += event.delta if event.type == "response.output_text.delta" else ""
            self.last = event
            if event.sequence_number == until or event.type == "response.incomplete":
                break
        return self


async def whole(client: openai.AsyncOpenAI, **changes: Any) -> Read:
    return await Read().take(await client.responses.create(stream=True, **(ASKED | changes)))


async def test_http_sse_and_websocket_say_the_same(client: openai.AsyncOpenAI) -> None:
    streamed = await whole(client)
    assert streamed.numbers == list(range(len(streamed.numbers)))
    assert len(streamed.text) > 200
    asked_whole = await client.responses.create(**ASKED)
    assert asked_whole.output_text == streamed.text
    assert asked_whole.status == "incomplete"
    async with client.responses.connect() as connection:
        await connection.response.create(**ASKED)
        over_socket = await Read().take(connection)
    assert over_socket.text == streamed.text
    assert over_socket.numbers == streamed.numbers


async def test_lanes_of_one_socket_stream_side_by_side(client: openai.AsyncOpenAI) -> None:
    async with client.responses.connect() as connection:
        for lane in ("a", "b", "c"):
            await connection.response.create(**ASKED, stream_id=lane)
        texts = {"a": "", "b": "", "c": ""}
        ids = dict.fromkeys(texts, "")
        switches, ended, last = 0, 0, None
        async for event in connection:
            lane = str(event.stream_id)
            switches += lane != last
            last = lane
            if event.type == "response.output_text.delta":
                texts[lane] += event.delta
            elif event.type == "response.incomplete":
                ids[lane] = event.response.id
                ended += 1
                if ended == len(texts):
                    break
    assert switches > 10, "they took turns"
    for lane, response_id in ids.items():
        assert (await client.responses.retrieve(response_id)).output_text == texts[lane]


async def test_a_conversation_goes_on_over_the_socket(client: openai.AsyncOpenAI) -> None:
    short = ASKED | {"max_output_tokens": 16}
    async with client.responses.connect() as connection:
        await connection.response.create(**short, store=False)
        first = await Read().take(connection)
        again = short | {"input": "Go on.", "previous_response_id": first.last.response.id}
        await connection.response.create(**again)
        second = await Read().take(connection)
    usage = second.last.response.usage
    assert usage.input_tokens > first.last.response.usage.total_tokens


async def test_cancel_frees_the_worker_and_is_stored(client: openai.AsyncOpenAI) -> None:
    running = await client.responses.create(
        **(ASKED | {"max_output_tokens": 1500}), background=True
    )
    assert running.status == "in_progress"
    cancelled = await client.responses.cancel(running.id)
    assert cancelled.status == "cancelled"
    assert (await client.responses.retrieve(running.id)).status == "cancelled"


async def test_a_background_response_completes_by_itself(client: openai.AsyncOpenAI) -> None:
    expected = await whole(client)
    running = await client.responses.create(**ASKED, background=True)
    async with asyncio.timeout(240):
        while (found := await client.responses.retrieve(running.id)).status == "in_progress":
            await asyncio.sleep(0.1)
    assert found.output_text == expected.text


@pytest.mark.parametrize("transport", ["sse", "websocket"])
async def test_a_second_gateway_goes_on_after_the_first_was_killed(
    own_stack: LiveStack, transport: str
) -> None:
    await asyncio.to_thread(own_stack.start_all)
    first_gateway = own_stack.of("gateway")
    port = free_port()
    second_gateway = own_stack.start("gateway", PORT=str(port))
    await asyncio.to_thread(second_gateway.wait_ready)
    async with (
        client_of(own_stack.base_url) as first,
        client_of(f"http://127.0.0.1:{port}/v1") as second,
    ):
        undisturbed = await whole(second)
        read = Read()
        if transport == "sse":
            events = await first.responses.create(stream=True, **ASKED)
            response_id = (await anext(events)).response.id
            read.numbers.append(0)
            await read.take(events, until=30)
            first_gateway.kill()
        else:
            async with first.responses.connect() as connection:
                await connection.response.create(**ASKED)
                response_id = (await connection.recv()).response.id  # type: ignore[union-attr]
                read.numbers.append(0)
                await read.take(connection, until=30)
                first_gateway.kill()
        await read.take(
            await second.responses.retrieve(response_id, stream=True, starting_after=30)
        )
        assert read.text == undisturbed.text
        assert read.numbers == undisturbed.numbers
        async with asyncio.timeout(60):
            while (stored := await second.responses.retrieve(response_id)).status == "in_progress":
                await asyncio.sleep(0.1)
        assert (stored.status, stored.output_text) == ("incomplete", undisturbed.text)
        usage: Any = stored.usage
        assert usage.model_extra["diptych"]["attempt"] == 1
