"""Store-and-forward on the real stack: parked KV gives the text that one worker alone gives."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych_contracts import subjects
from diptych_contracts.fleet import WorkerLoad
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROMPTS = [
    "The capital of France is",
    "日本の首都はどこですか。",
    "Name three colours.",
    "What is 12 times 12? Think first.",
    "Write a line about autumn.",
    "Tell me about the sea. " * 12,
    "List the planets, from the sun outwards.",
    "Once upon a time there was a lighthouse keeper. " * 15,
    "Was heißt »Brücke« auf Englisch?",
    "Count the sheep, one by one. " * 40,
]
GIB = str(2**30)
START_S = 300.0
"""On a machine that does much else."""


@pytest.fixture(scope="module")
def parked_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A decode worker with one seat, and room to park in memory and on disk."""
    stack = LiveStack(tmp_path_factory.mktemp("stack"))
    folder = tmp_path_factory.mktemp("parking")
    try:
        start_all(stack, folder)
        yield stack
    finally:
        stack.close()
    assert not list(folder.iterdir())


def start_all(stack: LiveStack, folder: Path) -> None:
    rooms = {
        "KV_PARKING_HOST_BYTES": GIB,
        "KV_PARKING_DISK_BYTES": GIB,
        "KV_PARKING_DIR": str(folder),
        "MAX_SEQUENCES": "1",
    }
    patient = {
        "INTER_TOKEN_S": "120",
        "TRANSFER_S": "120",
        "ACCEPT_S": "60",
        "FIRST_TOKEN_S": "600",
    }
    settings = {"decode-worker": rooms, "gateway": patient, "scheduler": {"SILENCE_S": "10"}}
    services = ("prefill-worker", "decode-worker", "scheduler", "power-governor", "gateway")
    started = [stack.start(service, **settings.get(service, {})) for service in services]
    for process in started:
        process.wait_ready(START_S)
    stack.wait_for_model(START_S)


@pytest.fixture
async def client(parked_stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=parked_stack.base_url, api_key="none", max_retries=0, timeout=900
    ) as client:
        yield client


async def ask(
    client: openai.AsyncOpenAI,
    text: str,
    max_tokens: int = 24,
    *,
    ignore_eos: bool = False,
    **forced: str,
) -> tuple[str, dict[str, Any]]:
    """A greedy answer, and what usage tells of its path."""
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"diptych": forced, "ignore_eos": ignore_eos},
    )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.model_extra["diptych"]  # type: ignore[index]


@pytest.mark.parametrize("path", ["dis-cpu", "dis-disk"])
async def test_each_path_gives_the_text_of_one_worker_alone(
    path: str, client: openai.AsyncOpenAI
) -> None:
    for text in PROMPTS:
        expected, alone = await ask(client, text, mode="local")
        assert (alone["mode"], alone["path"]) == ("local", "colocated")
        found, told = await ask(client, text, path=path)
        assert found == expected
        assert (told["mode"], told["path"], told["attempt"]) == ("remote", path, 1)
        assert told["parked_ms"] > 0


@pytest.mark.parametrize("path", ["dis-cpu", "dis-disk"])
async def test_a_crowd_parks_and_is_answered_in_full(path: str, client: openai.AsyncOpenAI) -> None:
    expected = {text: (await ask(client, text, mode="local"))[0] for text in PROMPTS[:6]}
    answers = await asyncio.gather(*(ask(client, text, path=path) for text in expected))
    assert [text for text, _ in answers] == list(expected.values())
    assert {(told["path"], told["attempt"]) for _, told in answers} == {(path, 1)}


@pytest.mark.parametrize("path", ["dis-cpu", "dis-disk"])
async def test_prefill_is_killed_once_its_kv_is_parked(
    path: str, own_stack: LiveStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`SIGKILL` while the answer waits for the seat of another: same text, first attempt."""
    folder = tmp_path_factory.mktemp("parking")
    start_all(own_stack, folder)
    kind = "host" if path == "dis-cpu" else "disk"
    bus = await own_stack.join()
    parked = asyncio.Event()

    def heard(delivery: Any) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        used = any(room.kind == kind and room.used_bytes for room in load.parking)
        if load.parked == 1 and used and not load.transfer_slots_used:
            parked.set()

    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=900
    ) as client:
        text = PROMPTS[5]
        expected, _ = await ask(client, text, mode="local")
        await bus.subscribe(subjects.LOADS, heard)
        sitting = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a long story."}],
            stream=True,
            max_tokens=4000,
            extra_body={"diptych": {"mode": "local"}, "ignore_eos": True},
        )
        for _ in range(4):  # it has tokens, so it has the seat
            await anext(sitting)
        asking = asyncio.create_task(ask(client, text, path=path))
        async with asyncio.timeout(START_S):
            await parked.wait()
        own_stack.of("prefill-worker").kill()
        await sitting.close()  # its client leaves: the seat falls free
        found, told = await asking
        assert found == expected
        assert (told["path"], told["attempt"]) == (path, 1)
        assert told["parked_ms"] > 0
    await bus.close()
    await asyncio.to_thread(own_stack.of("decode-worker").stop)
    assert not list(folder.iterdir())
