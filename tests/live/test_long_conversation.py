"""Conversations of megabytes on real processes: `sim` with a context to match, two gateways."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_contracts.streams import PROMPTS, RESPONSE_PARTS
from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.ports import free_port

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500)]

MEGABYTES_6 = 7_000_000
LINE = "a sea was calm and a lamp burned on, "


def text(chars: int, name: str) -> str:
    return f"{name}: " + LINE * (chars // len(LINE))


@pytest.fixture(scope="module")
def sim_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A token per byte: 6 MB are six million tokens, far more than one message of the bus holds."""
    live = LiveStack(tmp_path_factory.mktemp("stack"), engine="sim", patient=True)
    try:
        live.start_all(
            {
                "CONTEXT_TOKENS": str(MEGABYTES_6),
                "KV_TOKENS": str(2 * MEGABYTES_6),
                "TRANSFER_SLOTS": "4200",
            }
        )
        yield live
    finally:
        live.close()


@pytest.fixture(scope="module")
def second_url(sim_stack: LiveStack) -> str:
    port = free_port()
    sim_stack.start("gateway", PORT=str(port)).wait_ready()
    return f"http://127.0.0.1:{port}/v1"


def client_of(base_url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=400)


@asynccontextmanager
async def objects(stack: LiveStack) -> AsyncIterator[JetStreamBus]:
    bus = await stack.join()
    try:
        yield bus
    finally:
        await bus.close()


async def gone(bus: JetStreamBus, bucket: str) -> None:
    async with asyncio.timeout(60):
        while await bus.object_names(bucket):
            await asyncio.sleep(0.1)


async def test_a_prompt_of_128k_tokens_is_handed_over(sim_stack: LiveStack) -> None:
    async with client_of(sim_stack.base_url) as client, objects(sim_stack) as bus:
        answer: Any = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": text(131_072 + 64, "long")}],
            max_tokens=20,
            temperature=0,
        )
        assert answer.usage.prompt_tokens > 131_072
        assert answer.usage.completion_tokens > 0
        assert answer.usage.model_extra["diptych"]["mode"] == "remote"
        await gone(bus, PROMPTS)


async def test_six_megabytes_survive_previous_response_id_and_leave_nothing(
    sim_stack: LiveStack, second_url: str
) -> None:
    async with client_of(sim_stack.base_url) as one, client_of(second_url) as two:
        ids: list[str] = []
        tokens: list[int] = []
        for number, client in enumerate((one, two, one)):
            turn: Any = await client.responses.create(
                model=MODEL,
                input=text(2_000_000, f"turn {number}"),
                temperature=0,
                max_output_tokens=8,
                **({"previous_response_id": ids[-1]} if ids else {}),
            )
            ids.append(turn.id)
            tokens.append(turn.usage.input_tokens)
        assert tokens[0] > 1_900_000
        assert tokens[2] > 5_700_000, "the whole conversation was read"
        assert tokens[2] > tokens[1] + 1_900_000
        again: Any = await two.responses.create(
            model=MODEL,
            input=text(2_000_000, "turn 2"),
            temperature=0,
            max_output_tokens=8,
            previous_response_id=ids[1],
        )
        third = await one.responses.retrieve(ids[2])
        assert again.output_text == third.output_text, "either gateway reads the same"
        async with objects(sim_stack) as bus:
            async with asyncio.timeout(60):
                while len(await bus.object_names(RESPONSE_PARTS)) != 4:
                    await asyncio.sleep(0.1)
            for response_id in (*ids, again.id):
                await two.responses.delete(response_id)
            await gone(bus, RESPONSE_PARTS)
            await gone(bus, PROMPTS)


async def test_a_socket_carries_a_conversation_of_megabytes(sim_stack: LiveStack) -> None:
    async with client_of(sim_stack.base_url) as client:
        options = {"max_size": None}
        async with client.responses.connect(websocket_connection_options=options) as connection:
            last: Any = None
            for number in range(2):
                await connection.response.create(
                    model=MODEL,
                    input=text(1_500_000, f"turn {number}"),
                    temperature=0,
                    max_output_tokens=4,
                    **({"previous_response_id": last.id} if last else {}),
                )
                async for event in connection:
                    assert event.type != "error", event
                    if event.type in ("response.incomplete", "response.completed"):
                        last = event.response
                        break
        assert last.usage.input_tokens > 2_800_000


async def test_what_exceeds_the_context_is_refused_by_its_limit(sim_stack: LiveStack) -> None:
    async with client_of(sim_stack.base_url) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text(7_400_000, "x")}]
            )
        assert refused.value.code == "context_length_exceeded"
        assert f"context holds {MEGABYTES_6} tokens" in str(refused.value)


async def test_others_are_served_meanwhile_and_the_gateway_gives_its_memory_back(
    sim_stack: LiveStack,
) -> None:
    gateway = next(p for p in sim_stack.processes if p.service == "gateway")
    async with client_of(sim_stack.base_url) as client:

        async def small() -> None:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
            )

        async def large() -> None:
            await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": text(6_000_000, "long")}],
                max_tokens=4,
            )

        await large()
        before = rss_bytes(gateway.popen.pid)
        meanwhile = 0
        for _ in range(3):
            task = asyncio.create_task(large())
            while not task.done():
                await small()
                meanwhile += not task.done()
                await asyncio.sleep(0.05)
            await task
        assert meanwhile >= 3, "others are served meanwhile"
        async with asyncio.timeout(60):
            while rss_bytes(gateway.popen.pid) - before >= 64 * 1024 * 1024:
                await asyncio.sleep(0.1)


async def test_the_default_model_refuses_128k_tokens_by_its_limit(stack: LiveStack) -> None:
    async with client_of(stack.base_url) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input=text(600_000, "long"))
        assert refused.value.code == "context_length_exceeded"
        assert "context holds 8192 tokens" in str(refused.value)
        async with objects(stack) as bus:
            assert await bus.object_names(PROMPTS) == []
            assert await bus.object_names(RESPONSE_PARTS) == []


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no VmRSS of {pid}")
