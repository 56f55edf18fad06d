"""An engine's assert must not walk through the fleet: real processes that really abort."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack, Process
from diptych_testkit.mortal_worker import AT_ONCE, LATER, MODULE

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

WORKERS = ("prefill-worker", "prefill-worker", "decode-worker", "decode-worker")
NEIGHBOURS = 6
SHORT_CLIENTS = 3
LONG, SHORT = 900, 12


class Fleet:
    """A stack on engines that can be killed; what dies is started again."""

    def __init__(self, folder: Path) -> None:
        self.stack = LiveStack(folder, engine="sim")
        self.workers: list[Process] = []
        self.deaths: list[int] = []
        self.module = MODULE

    def start(self) -> None:
        for service in WORKERS:
            self.workers.append(self.stack.start(service, module=self.module))
        others = [self.stack.start(s) for s in ("scheduler", "scheduler", "gateway")]
        for process in (*self.workers, *others):
            process.wait_ready()
        self.stack.wait_for_model()

    async def watch(self) -> None:
        """Start dead workers again until cancelled, as a supervisor does."""
        while True:
            for number, worker in enumerate(self.workers):
                if (code := worker.popen.poll()) is not None:
                    self.deaths.append(code)
                    again = self.stack.start(worker.service, module=self.module)
                    self.workers[number] = again
            await asyncio.sleep(0.1)

    async def replace(self) -> None:
        """The same workers with an engine that was repaired."""
        self.module = ""
        for number, worker in enumerate(self.workers):
            await asyncio.to_thread(worker.stop)
            self.workers[number] = self.stack.start(worker.service)
        for worker in self.workers:
            await asyncio.to_thread(worker.wait_ready)
        await asyncio.to_thread(self.stack.wait_for_model)

    def diptych(self, *arguments: str, code: int = 0) -> str:
        """What a command says."""
        command = [sys.executable, "-m", "diptych_cli", *arguments, *self.stack.where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        await asyncio.to_thread(fleet.start)
        yield fleet
    finally:
        await asyncio.to_thread(fleet.stack.close)


@dataclass
class Clients:
    """Some that ask at length, and one that asks shortly again and again."""

    client: openai.AsyncOpenAI
    served: int = 0
    slowest_s: float = 0.0
    texts: list[str] = field(default_factory=list)

    async def whole(self, question: str, tokens: int, **more: Any) -> str:
        answer = await self.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=tokens,
            temperature=0,
            **more,
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == tokens
        return answer.choices[0].message.content or ""

    async def streamed(self, question: str, tokens: int) -> None:
        stream = await self.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
        )
        async for chunk in stream:
            self.texts.append(chunk.choices[0].delta.content or "")

    async def ask_shortly(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked_s = loop.time()
            await self.whole(f"short {self.served}", SHORT)
            self.served += 1
            self.slowest_s = max(self.slowest_s, loop.time() - asked_s)
            await asyncio.sleep(0.05)


async def dies(clients: Clients, word: str, *, stream: bool) -> openai.APIError:
    """Ask what kills; gives what the client is told."""
    ask = clients.streamed if stream else clients.whole
    with pytest.raises(openai.APIError) as told:
        await ask(word, 200)
    return told.value


@pytest.mark.parametrize("word", [AT_ONCE, LATER])
async def test_an_engine_assert_does_not_walk_through_the_fleet(word: str, fleet: Fleet) -> None:
    """The client's library repeats failed calls: it must be told not to."""
    async with openai.AsyncOpenAI(
        base_url=fleet.stack.base_url, api_key="none", timeout=120
    ) as client:
        clients = Clients(client)
        undisturbed = await clients.whole("neighbour", LONG)
        watching = asyncio.create_task(fleet.watch())
        shortly = [asyncio.create_task(clients.ask_shortly()) for _ in range(SHORT_CLIENTS)]
        long = [asyncio.create_task(clients.whole("neighbour", LONG)) for _ in range(NEIGHBOURS)]
        await asyncio.sleep(1.0)
        told = await dies(clients, word, stream=word == LATER)
        served = clients.served
        assert "5 attempts were lost, the last one: " in str(told)
        assert told.code == "failed"
        if isinstance(told, openai.APIStatusError):
            assert told.response.headers["x-should-retry"] == "false"
        async with asyncio.timeout(60):
            while len(fleet.deaths) < 5:
                await asyncio.sleep(0.05)
        assert fleet.deaths == [-6] * 5, "five aborts, and no call repeated"
        assert served >= 3, f"the others are served meanwhile, slowest {clients.slowest_s} s"
        assert await asyncio.gather(*long) == [undisturbed] * NEIGHBOURS
        assert not any(task.done() for task in shortly), "nobody else saw an error"
        for task in (*shortly, watching):
            task.cancel()
        await asyncio.wait([*shortly, watching])
        await is_buried_and_can_be_retried(fleet, word)


async def is_buried_and_can_be_retried(fleet: Fleet, word: str) -> None:
    (dead,) = json.loads(await asyncio.to_thread(fleet.diptych, "dead", "list", "--json"))
    assert dead["cause"] == "lost_workers"
    shown = json.loads(await asyncio.to_thread(fleet.diptych, "dead", "show", dead["id"]))
    assert shown["lost_attempts"] == 5
    assert word not in json.dumps(shown)
    assert [s["workers"] != [] for s in shown["setbacks"]] == [True] * 5
    with_prompt = await asyncio.to_thread(fleet.diptych, "dead", "show", dead["id"], "--prompt")
    assert word in json.loads(with_prompt)["prompt"]
    assert shown["trace_id"]
    await fleet.replace()
    said = await asyncio.to_thread(fleet.diptych, "dead", "retry", dead["id"][:8])
    response_id = said.strip().rsplit("/", 1)[1]
    async with httpx.AsyncClient(base_url=fleet.stack.base_url, timeout=60) as http:
        async with asyncio.timeout(100):
            while (found := (await http.get(f"/responses/{response_id}")).json())[
                "status"
            ] == "in_progress":
                await asyncio.sleep(0.1)
    assert found["status"] in ("completed", "incomplete"), found
    assert len(found["output"][0]["content"][0]["text"]) > 0
    assert found["usage"]["output_tokens"] == 200
    assert found["metadata"] == {"diptych_retried_from": dead["id"]}
    (listed,) = json.loads(await asyncio.to_thread(fleet.diptych, "dead", "list", "--json"))
    assert listed["retried_as"] == response_id
