"""Structured output by the default model: valid, always, and untouched by a death in mid-answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import openai
import pytest

from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Grammar, Sampling
from diptych_testkit.bare_engine import BareEngine, Question
from diptych_testkit.live_model import card, codec, settings
from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.structured_list import schema_list, valid
from diptych_worker.assembling import load_engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

TRIES = 6
"""Who does not come to run for a while strikes when the answer is over."""
MOST = 80
"""Tokens; the shortest answer found to any of the list has 53."""
SAMPLINGS = {"greedy": Sampling(temperature=0.0), "sampled": Sampling(temperature=1.0, seed=7)}
THING = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "scenes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "minutes": {"type": "integer"}},
                "required": ["place", "minutes"],
                "additionalProperties": False,
            },
            "minItems": 4,
            "maxItems": 6,
        },
    },
    "required": ["title", "scenes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "film", "schema": THING, "strict": True}}
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Describe a film about a lighthouse, in JSON."}],
    "temperature": 0,
    "max_tokens": 150,
}


@pytest.fixture(scope="module")
def crowd() -> Iterator[BareEngine]:
    roomy = replace(settings(), threads=2, kv_tokens=8192, max_sequences=16)
    engine = BareEngine(load_engine(roomy, card()))
    yield engine
    engine.close()


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_every_schema_of_the_list_is_answered_validly(kind: str, crowd: BareEngine) -> None:
    questions = [
        Question(
            codec().encode_chat([{"role": "user", "content": f"{entry['ask']} Answer in JSON."}]),
            MOST,
            msgspec.structs.replace(
                SAMPLINGS[kind],
                grammar=Grammar(kind="json_schema", text=json.dumps(entry["schema"])),
            ),
        )
        for entry in schema_list()
    ]
    answers = crowd.answers(questions)
    wrong = []
    for place, (entry, ids) in enumerate(zip(schema_list(), answers, strict=True)):
        text = b"".join(codec().token_bytes(token) for token in ids).decode()
        try:
            assert crowd.finishes[place] is EndReason.STOP
            valid(text, entry["schema"])
        except Exception as err:
            wrong.append(f"{entry['name']}: {text!r}: {err}")
    assert not wrong, f"{len(wrong)} of {len(answers)}: " + "\n".join(wrong)


@pytest.fixture
async def client(own_stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    await asyncio.to_thread(own_stack.start_all)
    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=240
    ) as client:
        yield client


async def test_stock_clients_get_what_they_asked_for(client: openai.AsyncOpenAI) -> None:
    whole: Any = await client.chat.completions.create(**ASKED, response_format=FORMAT)  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason == "stop"
    film = valid(whole.choices[0].message.content, THING)
    assert len(film["scenes"]) >= 4
    any_object: Any = await client.chat.completions.create(
        **{**ASKED, "temperature": 1, "seed": 5, "max_tokens": 40},
        response_format={"type": "json_object"},
    )  # type: ignore[call-overload]
    assert isinstance(json.loads(any_object.choices[0].message.content), dict)
    schema_format = {"type": "json_schema", **FORMAT["json_schema"]}
    response: Any = await client.responses.create(
        model=MODEL,
        input="Describe a film about a lighthouse, in JSON.",
        max_output_tokens=150,
        text={"format": schema_format},  # type: ignore[arg-type]
    )
    assert response.status == "completed"
    valid(response.output_text, THING)
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        await client.chat.completions.create(
            **ASKED,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}},
            },
        )  # type: ignore[call-overload]


class Streamed:
    """One stream of structured output."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.text = ""
        self.finish = ""
        self.chunks = 0
        self.attempt = 0
        self._grown = asyncio.Event()

    async def run(self) -> "Streamed":
        stream = await self._client.chat.completions.create(
            **ASKED, response_format=FORMAT, stream=True, stream_options={"include_usage": True}
        )  # type: ignore[call-overload]
        async for chunk in stream:
            if chunk.choices:
                self.text += chunk.choices[0].delta.content or ""
                self.finish = chunk.choices[0].finish_reason or self.finish
                self.chunks += 1
                self._grown.set()
            elif chunk.usage:
                self.attempt = chunk.usage.model_extra["diptych"]["attempt"]
        return self

    async def until(self, chunks: int) -> None:
        async with asyncio.timeout(120):
            while self.chunks < chunks:
                self._grown.clear()
                await self._grown.wait()


async def test_a_decode_worker_killed_in_mid_answer_changes_nothing(
    own_stack: LiveStack, client: openai.AsyncOpenAI
) -> None:
    undisturbed = await Streamed(client).run()
    assert undisturbed.finish == "stop"
    valid(undisturbed.text, THING)
    for _ in range(TRIES):
        streamed = Streamed(client)
        running = asyncio.create_task(streamed.run())
        await streamed.until(20)
        own_stack.of("decode-worker").kill()
        await running
        assert streamed.finish == "stop"
        assert streamed.text == undisturbed.text
        if streamed.attempt != 1:
            break
        await asyncio.to_thread(own_stack.start("decode-worker").wait_ready)
        await asyncio.to_thread(own_stack.wait_for_model)
    assert streamed.attempt == 2
