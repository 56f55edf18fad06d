"""A batch on real processes and real weights, while every service in turn is killed."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import openai
import pytest

from diptych_bus.port import Gone, Kept
from diptych_contracts.requests import PriorityClass, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500)]

CHAT = "/v1/chat/completions"
LINES, TOKENS = 50, 12
SERVICES = ("decode-worker", "prefill-worker", "scheduler", "power-governor", "nats", "gateway")
"""The gateway last: it is what tells how far the batch is."""


def jsonl() -> bytes:
    lines = []
    for number in range(LINES):
        said = [{"role": "user", "content": f"Count from {number} on."}]
        body = {"model": MODEL, "messages": said, "max_tokens": TOKENS, "temperature": 0}
        lines.append({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body})
    return b"\n".join(json.dumps(line).encode() for line in lines)


@pytest.fixture
async def client(own_stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    await asyncio.to_thread(own_stack.start_all)
    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=10, timeout=60
    ) as client:
        yield client


async def start(client: openai.AsyncOpenAI) -> str:
    file = await client.files.create(file=("in.jsonl", jsonl()), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h"
    )
    return batch.id


async def done(client: openai.AsyncOpenAI, batch_id: str) -> int:
    """How many lines are; -1 once the batch is over."""
    batch = await client.batches.retrieve(batch_id)
    if batch.status == "completed":
        return -1
    assert batch.status in ("validating", "in_progress", "finalizing"), batch
    return batch.request_counts.completed if batch.request_counts else 0


async def until(client: openai.AsyncOpenAI, batch_id: str, lines: int) -> bool:
    """Wait until so many lines are done; False once the batch is over."""
    client = client.with_options(max_retries=0)  # its pauses grow, and the batch goes on meanwhile
    async with asyncio.timeout(240):
        while True:
            with suppress(openai.APIError):
                found = await done(client, batch_id)
                if found < 0 or found >= lines:
                    return found >= 0
            await asyncio.sleep(0.2)


async def texts(client: openai.AsyncOpenAI, batch_id: str) -> dict[str, str]:
    await until(client, batch_id, LINES + 1)
    batch = await client.batches.retrieve(batch_id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (LINES, 0)
    assert batch.error_file_id is None
    assert batch.output_file_id is not None
    content = (await client.files.content(batch.output_file_id)).text
    lines = [json.loads(line) for line in content.splitlines()]
    assert Counter(line["custom_id"] for line in lines) == Counter(f"c{n}" for n in range(LINES))
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }


async def restart(stack: LiveStack, service: str) -> None:
    """SIGKILL, and a new life."""
    if service == "nats":
        await asyncio.to_thread(stack.nats.kill_blocking)
        await asyncio.to_thread(stack.nats.start_blocking)
        return
    await asyncio.to_thread(stack.of(service).kill)
    process = stack.start(service)
    await asyncio.to_thread(process.wait_ready)


async def ran(stack: LiveStack) -> int:
    """How many requests were given to workers: their records outlast this test."""
    records: dict[str, RequestRecord] = {}

    def hear(change: Kept[RequestRecord] | Gone) -> None:
        if isinstance(change, Kept):
            records[change.key] = change.value

    bus = await stack.join()
    try:
        watch = await bus.bucket(REQUEST_RECORDS, RequestRecord).watch(hear)
        await watch.close()
    finally:
        await bus.close()
    assigned = [record for record in records.values() if record.assignment is not None]
    heads = [record.head for record in assigned if record.head is not None]
    assert {head.priority_class for head in heads} == {PriorityClass.BATCH}
    return len(assigned)


async def test_a_batch_of_50_survives_the_death_of_every_service(
    own_stack: LiveStack, client: openai.AsyncOpenAI
) -> None:
    undisturbed = await texts(client, await start(client))
    assert await ran(own_stack) == LINES
    left, batches = list(SERVICES), 0
    while left:  # a batch that is over before all had their turn is followed by another
        batch_id, batches = await start(client), batches + 1
        assert batches <= len(SERVICES)
        for number, service in enumerate(tuple(left), start=1):
            if not await until(client, batch_id, number * LINES // (len(left) + 3)):
                break
            await restart(own_stack, service)
            left.remove(service)
        assert await texts(client, batch_id) == undisturbed
    assert await ran(own_stack) == (1 + batches) * LINES
