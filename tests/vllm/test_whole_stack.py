"""Every service, with workers in front of real vLLM servers that hand KV over by NIXL.

Not in CI: vLLM for CPUs takes 4 GB, and its torch lies in no index that CI reaches. `make vllm`.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.tiny_llama import write_tiny_llama
from diptych_testkit.vllm_server import COMMAND, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

PROMPTS = 20
SOURCES = "vllm:prompt_tokens_by_source_total"


class Fleet:
    """A stack whose prefill worker has one server, and each of its two decode workers another."""

    def __init__(self, folder: Path, ending: ExitStack) -> None:
        command = os.environ.get(COMMAND, "")
        assert command, f"{COMMAND}: expected the path of a `vllm` for CPUs with NIXL, saw none"
        model = write_tiny_llama(folder / "model")
        self.servers: list[VllmServer] = []
        for name in ("prefill", "decode-1", "decode-2"):
            server = VllmServer(folder / name, command, model)
            ending.callback(server.stop)
            self.servers.append(server.start())
        self.prefill, *self.decodes = self.servers
        self.stack = LiveStack(folder, patient=True)
        ending.callback(self.stack.close)

    def start(self) -> None:
        for server in self.servers:
            server.wait_ready()
        started = [self.stack.start("prefill-worker", **self.prefill.settings)]
        started += [self.stack.start("decode-worker", **one.settings) for one in self.decodes]
        started += [self.stack.start(s) for s in ("scheduler", "power-governor", "gateway")]
        for process in started:
            process.wait_ready()
        self.stack.wait_for_model()

    def fetched_tokens(self) -> float:
        return sum(one.total(SOURCES, 'source="external_kv_transfer"') for one in self.decodes)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as ending:
        fleet = Fleet(tmp_path_factory.mktemp("vllm"), ending)
        fleet.start()
        yield fleet


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=fleet.stack.base_url, api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client


class Answer:
    """One streamed answer, which never ends by itself before `max_tokens`."""

    def __init__(self) -> None:
        self.text, self.chunks = "", 0
        self.told: dict[str, object] = {}
        self.prompt_tokens = 0

    async def run(
        self, client: openai.AsyncOpenAI, question: str, *, mode: str, tokens: int, seed: int = 0
    ) -> "Answer":
        """Greedy where `seed` is 0."""
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            temperature=0.8 if seed else 0,
            seed=seed,
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "diptych": {"mode": mode}},
        )
        async for chunk in stream:
            if chunk.choices:
                self.text += chunk.choices[0].delta.content or ""
                self.chunks += 1
            elif chunk.usage:
                self.prompt_tokens = chunk.usage.prompt_tokens
                self.told = chunk.usage.model_extra["diptych"]  # type: ignore[index]
        return self


async def test_kv_that_was_handed_over_leads_to_the_text_of_one_engine(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    rng = random.Random(1)
    before = fleet.fetched_tokens()
    questions = ["".join(rng.choices("abcdef ", k=rng.randint(1, 900))) for _ in range(PROMPTS)]
    handed = await asyncio.gather(
        *(
            Answer().run(client, question, mode="remote", tokens=40, seed=n % 2 * n)
            for n, question in enumerate(questions)
        )
    )
    assert {(a.told["mode"], a.told["link"], a.told["attempt"]) for a in handed} == {
        ("remote", "engine", 1)
    }
    fetched = fleet.fetched_tokens() - before
    assert fetched == sum(a.prompt_tokens for a in handed), "vLLM computed prompts again"
    whole = await asyncio.gather(
        *(
            Answer().run(client, question, mode="local", tokens=40, seed=n % 2 * n)
            for n, question in enumerate(questions)
        )
    )
    assert [a.text for a in handed] == [a.text for a in whole]


async def test_who_leaves_frees_the_engine(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    question = {"role": "user", "content": "leave"}
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[question],  # type: ignore[list-item]
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(30):
        while any(server.total("vllm:num_requests_running") for server in fleet.servers):
            await asyncio.sleep(0.1)


async def test_a_killed_decode_server_costs_no_token(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    answer = Answer()
    running = asyncio.create_task(answer.run(client, "kill", mode="remote", tokens=600))
    async with asyncio.timeout(120):
        while answer.chunks < 20:
            await asyncio.sleep(0.01)
    (busy,) = [one for one in fleet.decodes if one.total("vllm:num_requests_running")]
    fleet.decodes.remove(busy)
    await asyncio.to_thread(busy.kill)
    await running
    assert answer.told["attempt"] == 2
    undisturbed = await Answer().run(client, "kill", mode="local", tokens=600)
    assert answer.text == undisturbed.text
