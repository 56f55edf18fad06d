"""A client that leaves, on real weights: both workers are free, before the first token too."""

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from typing import Any

import httpx
import pytest

from diptych_bus.port import Delivery
from diptych_contracts import subjects
from diptych_contracts.fleet import WorkerLoad
from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.ports import free_port

pytestmark = pytest.mark.live

log = logging.getLogger(__name__)
CHAT = "/v1/chat/completions"
TRIES = 6
MISSED_S = 40.0
"""What was not seen by then is over."""
COMPUTED = re.compile(r"^\S*(?:prompt|generation)_tokens_total{[^}]*} (\S+)$", re.MULTILINE)


class Loads:
    """What every worker holds, as it says itself."""

    def __init__(self) -> None:
        self.newest: dict[str, WorkerLoad] = {}
        self.count = 0

    def hear(self, delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        self.newest[load.worker] = load
        self.count += 1

    def of(self, role: str) -> WorkerLoad:
        return next(load for worker, load in self.newest.items() if worker.startswith(role))

    async def until(self, holds: Any, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while len(self.newest) < 2 or not holds(self):
                await asyncio.sleep(0.005)

    def idle(self) -> bool:
        return all(
            (load.running, load.waiting, load.waiting_tokens, load.transfer_slots_used)
            == (0, 0, 0, 0)
            for load in self.newest.values()
        )


@pytest.fixture
async def loads(stack: LiveStack) -> AsyncIterator[Loads]:
    bus = await stack.join()
    heard = Loads()
    await bus.subscribe(subjects.LOADS, heard.hear)
    await heard.until(Loads.idle)
    yield heard
    await bus.close()


def asked(stack: LiveStack, *, words: int, max_tokens: int = 400) -> socket.socket:
    """A client that has asked for a stream."""
    sent = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{time.time()} " + "sheep " * words}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", stack.port))
    client.sendall(head.encode() + sent)
    return client


def computed(stack: LiveStack) -> int:
    """Tokens that both workers have computed, of prompts and of answers."""
    pages = [p.page("/metrics").decode() for p in stack.processes if p.service.endswith("worker")]
    return sum(int(float(count)) for page in pages for count in COMPUTED.findall(page))


async def left(client: socket.socket, loads: Loads, stage: str) -> None:
    """The client leaves; soon nothing is held."""
    began_s = time.monotonic()
    client.close()
    await asyncio.sleep(0)
    loads.newest.clear()
    await loads.until(Loads.idle)
    log.info("%s: free after %.0f ms", stage, (time.monotonic() - began_s) * 1000)
    await asyncio.sleep(0.3)
    assert loads.idle()


async def spares(stack: LiveStack, loads: Loads, leave: Callable[[], Any], tokens: int) -> None:
    """`leave` asks for `tokens` and leaves: not all of them are computed.

    Whoever does not come to run for a while may look when all is over: then once more.
    """
    for _ in range(TRIES):
        before = await asyncio.to_thread(computed, stack)
        with suppress(TimeoutError):
            await leave()
            if await asyncio.to_thread(computed, stack) - before < tokens:
                return
        await loads.until(Loads.idle)
    raise AssertionError(f"each time {tokens} tokens were computed to their end")


async def test_prefilling(stack: LiveStack, loads: Loads) -> None:
    """Before the first token: a prompt of 3,000 tokens takes seconds to compute."""

    async def leave() -> None:
        with closing(asked(stack, words=3000)) as client:
            await loads.until(
                lambda heard: (
                    heard.of("prefill").running and 0 < heard.of("prefill").waiting_tokens < 2800
                ),
                MISSED_S,
            )
            await left(client, loads, "prefilling")

    await spares(stack, loads, leave, 3000)


async def test_queued_behind_another(stack: LiveStack, loads: Loads) -> None:
    async def leave() -> None:
        with closing(asked(stack, words=3000)) as first:
            await loads.until(lambda heard: heard.of("prefill").running == 1, MISSED_S)
            with closing(asked(stack, words=1000)):
                await loads.until(
                    lambda heard: heard.of("decode").transfer_slots_used > 50, MISSED_S
                )
            await loads.until(lambda heard: heard.of("decode").waiting <= 1, MISSED_S)
            await left(first, loads, "queued, then prefilling")

    await spares(stack, loads, leave, 4000)


async def test_decoding(stack: LiveStack, loads: Loads) -> None:
    async def leave() -> None:
        with closing(asked(stack, words=100)) as client:
            await loads.until(lambda heard: heard.of("decode").running == 1, MISSED_S)
            await asyncio.sleep(0.2)
            await left(client, loads, "decoding")

    await spares(stack, loads, leave, 400)


async def test_a_chat_stream_goes_on_at_another_gateway_after_the_first_was_killed(
    own_stack: LiveStack,
) -> None:
    await asyncio.to_thread(own_stack.start_all)
    first, port = own_stack.of("gateway"), free_port()
    second = own_stack.start("gateway", PORT=str(port))
    await asyncio.to_thread(second.wait_ready)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a long story about a lighthouse."}],
        "temperature": 0,
        "max_tokens": 120,
        "stream": True,
    }
    url = f"http://127.0.0.1:{port}{CHAT}"
    async with httpx.AsyncClient(timeout=120) as client:
        undisturbed = said((await client.post(url, json=body)).text)
        text, last_id = "", ""
        sending = client.stream(
            "POST",
            f"{own_stack.base_url}/chat/completions",
            json=body,
            headers={"x-diptych-resume": "1"},
        )
        async with sending as response:
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
                text += said(line)
                if len(text) > 100:
                    first.kill()
                    break
        rest = await client.post(url, json=body, headers={"last-event-id": last_id})
        assert rest.status_code == 200, rest.text
        assert text + said(rest.text) == undisturbed
        assert len(said(rest.text)) > 100


def said(events: str) -> str:
    """The text of chat events."""
    lines = [line for line in events.split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
