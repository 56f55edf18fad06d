"""KV over each link on the real stack: the same text as one bare engine's."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from diptych_testkit.bare_engine import BareEngine
from diptych_testkit.live_model import bare_engine, codec
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = pytest.mark.live

PROMPTS = [
    "The capital of France is",
    "日本の首都はどこですか。",
    "Tell me about the sea. " * 12,
    "Count the sheep, one by one. " * 90,
]


@pytest.fixture(scope="module")
def bare() -> Iterator[BareEngine]:
    engine = bare_engine()
    yield engine
    engine.close()


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        yield client


async def ask(
    client: openai.AsyncOpenAI, text: str, link: str | None, max_tokens: int = 24
) -> tuple[str, dict[str, object]]:
    """A greedy answer over `link`, and what usage tells of its path."""
    forced = {"mode": "remote", "link": link} if link else {}
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"diptych": forced},
    )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.model_extra["diptych"]  # type: ignore[index]


@pytest.mark.parametrize("text", PROMPTS)
async def test_every_link_gives_the_bare_engines_text(
    text: str, client: openai.AsyncOpenAI, bare: BareEngine
) -> None:
    prompt = codec().encode(codec().render([{"role": "user", "content": text}]))
    expected = await asyncio.to_thread(bare.answer, prompt, 24)
    plain = b"".join(codec().token_bytes(token) for token in expected).decode("utf-8", "replace")
    for link in ("tcp", "shm"):
        told_text, path = await ask(client, text, link)
        assert told_text == plain
        assert (path["mode"], path["link"], path["attempt"]) == ("remote", link, 1)
        assert path["transfer_bytes"] > 0


async def test_many_at_once_share_one_connection(client: openai.AsyncOpenAI) -> None:
    answers = await asyncio.gather(*(ask(client, text, "tcp") for text in PROMPTS * 2))
    assert {(path["link"], path["attempt"]) for _, path in answers} == {("tcp", 1)}
    assert all(text for text, _ in answers)


@pytest.mark.parametrize("victim", ["decode-worker", "prefill-worker"])
async def test_a_frozen_peer_over_tcp_costs_no_token(victim: str, own_stack: LiveStack) -> None:
    await asyncio.to_thread(own_stack.start_all)
    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=240
    ) as client:
        text = PROMPTS[3]
        undisturbed, _ = await ask(client, text, "tcp")
        frozen = own_stack.of(victim)
        second = own_stack.start(victim)
        await asyncio.to_thread(second.wait_ready)
        asking = asyncio.create_task(ask(client, text, "tcp"))
        await asyncio.sleep(0.3)  # Somewhere in its prefill: any moment must do.
        frozen.signal(signal.SIGSTOP)
        disturbed, path = await asking
        assert disturbed == undisturbed
        assert path["link"] == "tcp"
        frozen.signal(signal.SIGCONT)


async def test_workers_that_offer_tcp_only_use_it(own_stack: LiveStack) -> None:
    for service in ("prefill-worker", "decode-worker"):
        own_stack.start(service, LINKS="tcp")
    for service in ("scheduler", "gateway"):
        own_stack.start(service)
    for process in own_stack.processes:
        await asyncio.to_thread(process.wait_ready)
    await asyncio.to_thread(own_stack.wait_for_model)
    async with openai.AsyncOpenAI(base_url=own_stack.base_url, api_key="none") as client:
        _, path = await ask(client, PROMPTS[0], None)
    assert (path["mode"], path["link"]) == ("remote", "tcp")
