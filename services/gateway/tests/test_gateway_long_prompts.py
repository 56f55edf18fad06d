"""Prompts and conversations of megabytes, over HTTP and WebSocket, at one gateway and another."""

import asyncio
import json
from typing import Any

import pytest
from websockets.asyncio.client import connect

from diptych_contracts.errors import BusAway
from diptych_contracts.prompts import MAX_INLINE_TOKENS, unpacked
from diptych_contracts.responses import StoredResponse
from diptych_contracts.streams import PROMPTS, RESPONSE_PARTS, RESPONSES
from diptych_policy.prefixes import block_hashes
from diptych_text.codec import TextCodec
from diptych_text.cutting import PART_CHARS

CONTEXT = 8_000_000
LINE = "the sea was calm and the lamp burned on, "


def text(chars: int, name: str) -> str:
    return f"{name}: " + LINE * (chars // len(LINE))


@pytest.fixture
async def stack(run_stack: Any, hello: Any) -> Any:
    async with run_stack(hello, context_tokens=CONTEXT) as made:
        yield made


async def prompt_of(stack: Any, request: Any) -> list[int]:
    """The ids a worker would find."""
    assert request.prompt_ids == ()
    data = await stack.fleet.bus.get_object(PROMPTS, request.prompt.name)
    return list(unpacked(data, request.prompt))


async def test_a_long_prompt_is_stored_apart_and_named(stack: Any) -> None:
    asked = [{"role": "user", "content": text(300_000, "long")}]
    assert (await stack.chat(messages=asked)).status_code == 200
    (request,) = stack.fleet.requests
    expected = stack.fleet.codec.encode_chat(asked)
    assert len(expected) > MAX_INLINE_TOKENS
    assert await prompt_of(stack, request) == expected
    assert (request.prompt.name, request.prompt.width) == (request.request_id, 2)
    assert request.prompt_tokens == len(expected)
    base = stack.fleet.card.fingerprint.base
    known = block_hashes("default", base, expected[: 1024 * 64], 64)
    assert (request.prompt.block_tokens, request.prompt.block_hashes) == (64, known)


async def test_a_short_one_goes_with_its_request(stack: Any) -> None:
    await stack.chat(messages=[{"role": "user", "content": text(50_000, "short")}])
    (request,) = stack.fleet.requests
    assert request.prompt is None
    assert 4_000 < len(request.prompt_ids) < MAX_INLINE_TOKENS
    assert await stack.fleet.bus.object_names(PROMPTS) == []


async def test_what_is_not_accepted_leaves_no_prompt(stack: Any) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise BusAway("no word of it")

    stack.member.bus.store = refuse
    answer = await stack.chat(messages=[{"role": "user", "content": text(300_000, "long")}])
    assert answer.status_code == 503
    assert stack.fleet.requests == []
    assert await stack.fleet.bus.object_names(PROMPTS) == []


async def test_a_prompt_beyond_the_context_is_refused_before_it_is_all_tokenized(
    run_stack: Any, hello: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = TextCodec._ids

    def counting(self: TextCodec, part: str) -> list[int]:
        encoded.append(len(part))
        return encode(self, part)

    monkeypatch.setattr(TextCodec, "_ids", counting)
    async with run_stack(hello, context_tokens=2048) as stack:
        answer = await stack.chat(messages=[{"role": "user", "content": text(7_000_000, "huge")}])
        assert sum(encoded) <= PART_CHARS
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "context holds 2048 tokens" in error["message"]
        assert stack.fleet.requests == []


async def test_a_body_beyond_the_limit_is_a_413_that_names_it(stack: Any) -> None:
    answer = await stack.chat(messages=[{"role": "user", "content": "x" * 8 * 1024 * 1024}])
    assert answer.status_code == 413
    assert str(8 * 1024 * 1024) in answer.json()["error"]["message"]


async def test_others_are_answered_while_a_long_text_is_tokenized(stack: Any) -> None:
    """They have their turn between two parts of it, of which there are forty."""
    asked = [{"role": "user", "content": text(40 * PART_CHARS, "long")}]
    long = asyncio.create_task(stack.chat(messages=asked))
    count = 0
    middling = [{"role": "user", "content": text(20_000, "middling")}]
    while not long.done():
        assert (await stack.chat(messages=middling)).status_code == 200
        count += 1
    assert (await long).status_code == 200
    assert count > 5


async def conversation(stack: Any, turns: int, **changes: Any) -> list[str]:
    """The ids of responses that build on one another, two megabytes each."""
    ids: list[str] = []
    async with stack.another("gateway-2") as other:
        for number in range(turns):
            client = (stack.client, other)[number % 2]
            body = stack.asked(input=text(2_000_000, f"turn {number}"), **changes)
            if ids:
                body["previous_response_id"] = ids[-1]
            answer = await client.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text[:500]
            ids.append(answer.json()["id"])
    return ids


async def test_a_conversation_of_six_megabytes_is_a_chain(stack: Any) -> None:
    ids = await conversation(stack, 3, store=True)
    whole: list[dict[str, str]] = []
    for number in range(3):
        whole.append({"role": "user", "content": text(2_000_000, f"turn {number}")})
        if number < 2:
            whole.append({"role": "assistant", "content": "Hello world"})
    expected = stack.fleet.codec.encode_chat(whole)
    assert await prompt_of(stack, stack.fleet.requests[-1]) == expected
    assert len(expected) * stack.fleet.requests[-1].prompt.width > 4_000_000

    names = await stack.fleet.bus.object_names(RESPONSE_PARTS)
    assert names == [f"{i}.turn" for i in ids]
    sizes = [len(await stack.fleet.bus.get_object(RESPONSE_PARTS, name)) for name in names]
    assert all(2_000_000 <= size < 2_001_000 for size in sizes), "no turn repeats another"
    kept = await stack.fleet.bus.bucket(RESPONSES, StoredResponse).get(ids[-1])
    assert kept.value.input == ()

    for response_id in ids:
        assert (await stack.client.delete(f"/v1/responses/{response_id}")).status_code == 200
    assert await stack.fleet.bus.object_names(RESPONSE_PARTS) == []


@pytest.mark.parametrize("store", [True, False])
async def test_a_socket_carries_one_too(stack: Any, store: bool) -> None:
    url = stack.base_url.replace("http", "ws") + "/responses"
    async with connect(url, max_size=None) as socket:
        previous: dict[str, str] = {}
        for number in range(3):
            frame = stack.asked(input=text(1_500_000, f"turn {number}"), store=store)
            await socket.send(json.dumps({"type": "response.create", **frame, **previous}))
            while (event := json.loads(await socket.recv()))["type"] != "response.completed":
                assert event["type"] != "error", event
            previous = {"previous_response_id": event["response"]["id"]}
    found = await prompt_of(stack, stack.fleet.requests[-1])
    assert len(found) > 4_000_000 // 4
    names = await stack.fleet.bus.object_names(RESPONSE_PARTS)
    assert len(names) == (3 if store else 0)


async def test_a_conversation_beyond_the_longest_is_refused_by_its_limit(stack: Any) -> None:
    ids = await conversation(stack, 3)
    body = stack.asked(input=text(3_000_000, "more"), previous_response_id=ids[-1])
    answer = await stack.client.post("/v1/responses", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "8000000" in error["message"]
