"""The whole stack on real weights."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from random import Random

import httpx
import nats
import openai
import pytest

from diptych_contracts.ids import new_incarnation, new_request_id
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.sampling import Stopping
from diptych_testkit.bare_engine import BareEngine
from diptych_testkit.builders import a_request
from diptych_testkit.bus_client import BusClient
from diptych_testkit.live_model import bare_engine, codec
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = pytest.mark.live

QUESTION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
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


async def test_the_stock_client_streams_a_sensible_answer_in_remote_mode(
    client: openai.AsyncOpenAI,
) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    usage = chunks[-1].usage
    assert usage is not None
    told = usage.model_extra["diptych"]  # type: ignore[index]
    assert told["mode"] == "remote"
    assert told["link"] == "shm"
    assert told["prefill_worker"].startswith("prefill-worker-")
    assert told["decode_worker"].startswith("decode-worker-")
    assert told["transfer_bytes"] > 500_000
    assert told["joules"]["total"] > 0
    assert told["energy_source"] == "sim"


async def test_a_whole_answer_equals_the_streamed_one(client: openai.AsyncOpenAI) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
    stream = await client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    streamed = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert whole.choices[0].message.content == streamed


async def test_answers_without_a_seed_differ_and_with_one_agree(
    client: openai.AsyncOpenAI,
) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 1.0, "max_tokens": 24}

    async def texts(**more: int) -> list[str | None]:
        answers = await asyncio.gather(
            *(client.chat.completions.create(**asked, **more) for _ in range(4))  # type: ignore[call-overload]
        )
        return [answer.choices[0].message.content for answer in answers]

    assert len(set(await texts())) == 4
    assert len(set(await texts(seed=7))) == 1


PROMPTS = [
    "Hi",
    "The capital of France is",
    "Zähle von eins bis zehn auf Deutsch:",
    "Écris une phrase sur la mer.",
    "日本の首都はどこですか。",
    "Скажи, какая столица у Испании?",
    "اكتب جملة عن الشمس.",
    "def fibonacci(n):\n    ",
]
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 600]


def numbered(n_tokens: int) -> tuple[int, ...]:
    """A prompt of exactly `n_tokens`."""
    text = " ".join(f"Step {number}: count the sheep." for number in range(n_tokens))
    return tuple(codec().encode(text)[:n_tokens])


@pytest.fixture
async def bus_client(stack: LiveStack) -> AsyncIterator[BusClient]:
    bus = await stack.join()
    client = BusClient(bus, new_incarnation("gateway", Random()))
    await client.start()
    yield client
    await client.close()
    await bus.close()


async def answer(
    client: BusClient, prompt: tuple[int, ...], mode: Mode, max_tokens: int
) -> list[int]:
    request = a_request(
        new_request_id(Random()),
        model=MODEL,
        prompt_ids=prompt,
        stopping=Stopping(max_tokens=max_tokens),
        forced=Forced(mode=mode),
    )
    await client.send(request)
    end = await client.ended(request.request_id)
    assert end.reason in (EndReason.STOP, EndReason.LENGTH), end
    assert end.report is not None
    assert end.report.mode == mode
    return client.delivered[request.request_id]


@pytest.mark.parametrize("n_tokens", LENGTHS)
async def test_both_modes_equal_one_bare_engine_token_for_token(
    n_tokens: int, bus_client: BusClient, bare: BareEngine
) -> None:
    prompt = numbered(n_tokens)
    expected = await asyncio.to_thread(bare.answer, prompt, 24)
    remote, local = await asyncio.gather(
        answer(bus_client, prompt, Mode.REMOTE, 24), answer(bus_client, prompt, Mode.LOCAL, 24)
    )
    assert remote == expected
    assert local == expected


@pytest.mark.parametrize("text", PROMPTS)
async def test_chat_in_any_language_equals_one_bare_engine(
    text: str, client: openai.AsyncOpenAI, bare: BareEngine
) -> None:
    messages = [{"role": "user", "content": text}]
    prompt = codec().encode(codec().render(messages))
    expected = await asyncio.to_thread(bare.answer, prompt, 32)
    text_bytes = b"".join(codec().token_bytes(token) for token in expected)
    for mode in Mode:
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=32,
            extra_body={"diptych": {"mode": mode}},
        )
        assert whole.choices[0].message.content == text_bytes.decode("utf-8", "replace")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(expected)


async def test_kv_bytes_never_appear_on_the_bus(
    stack: LiveStack, client: openai.AsyncOpenAI
) -> None:
    connection = await stack.client()
    seen = {"bytes": 0, "largest": 0, "messages": 0}

    async def count(message: nats.aio.msg.Msg) -> None:
        seen["largest"] = max(seen["largest"], len(message.data))
        if not message.subject.startswith(("beat.", "load.")):  # they come as long as it takes
            seen["bytes"] += len(message.data)
            seen["messages"] += 1

    await connection.subscribe(">", cb=count)
    await connection.flush()
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me about the sea. " * 40}],
        max_tokens=8,
        extra_body={"diptych": {"mode": "remote"}},
    )
    await connection.flush()
    await connection.drain()
    assert answer.usage is not None
    kv_bytes = answer.usage.model_extra["diptych"]["transfer_bytes"]  # type: ignore[index]
    assert seen["messages"] > 10
    assert kv_bytes > 5_000_000
    assert seen["largest"] < 65_536
    assert seen["bytes"] < kv_bytes / 20


async def test_bad_input_is_told_in_openais_words(stack: LiveStack) -> None:
    too_long = {"role": "user", "content": "word " * 9000}
    cases: list[tuple[object, int, str]] = [
        ({"model": "nobody", "messages": QUESTION}, 404, "model_not_found"),
        ({"model": MODEL, "messages": []}, 400, "messages"),
        ({"model": MODEL, "messages": QUESTION, "temperature": 9}, 400, "temperature"),
        ({"model": MODEL, "messages": [too_long]}, 400, "context_length_exceeded"),
    ]
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=60) as http:
        for body, status, word in cases:
            answer = await http.post("/chat/completions", json=body)
            assert answer.status_code == status, answer.text
            assert word in json.dumps(answer.json()["error"])


async def test_a_client_that_leaves_frees_both_workers(
    stack: LiveStack, client: openai.AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(aiter(stream))
    async with asyncio.timeout(120):
        while not await held(stack):
            await asyncio.sleep(0.02)
    await stream.close()
    async with asyncio.timeout(120):
        while (total := await held(stack)) > 0:
            await asyncio.sleep(0.1)
    assert total == 0


async def held(stack: LiveStack) -> float:
    """KV cells and sequences that the two workers hold, added up."""
    total = 0.0
    async with httpx.AsyncClient(timeout=60) as http:
        for service in ("prefill-worker", "decode-worker"):
            answer = await http.get(f"http://127.0.0.1:{stack.of(service).health_port}/metrics")
            for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
                assert name in answer.text
                total += sum(
                    float(line.rsplit(" ", 1)[1])
                    for line in answer.text.splitlines()
                    if line.startswith(name)
                )
    return total
