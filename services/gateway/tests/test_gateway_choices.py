"""Several answers to one call: interleaved, summed up, and ended together."""

import asyncio
from typing import Any

import pytest

from diptych_contracts.errors import StoreFull
from diptych_contracts.ids import sibling
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, Request
from diptych_gateway.admission.siblings import seeds

WORDS = ("Hello world", "grüße", "the end of it")


async def three(fleet: Any, request: Request) -> None:
    """Each choice says words of its own."""
    number = fleet.requests.index(request)
    while number < 3 and len(fleet.requests) < 3:
        await asyncio.sleep(0.002)
    token_ids = fleet.ids(WORDS[number % 3])
    for index, token in enumerate(token_ids):
        for _ in range(20):  # turns, in which the gateway hears of the last one
            await asyncio.sleep(0)
        end = EndReason.STOP if index == len(token_ids) - 1 else None
        fleet.say(request, [token], index=index, end=end)


async def test_choices_are_whole_and_their_usage_is_summed(run_stack: Any) -> None:
    async with run_stack(three) as stack:
        answer = (await stack.chat(n=3, seed=7)).json()
        alone = (await stack.chat()).json()
        requests = stack.fleet.requests[:3]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in answer["choices"]] == list(WORDS)
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop"] * 3
    tokens = sum(len(stack.fleet.ids(words)) for words in WORDS)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + tokens
    assert usage["diptych"]["joules"]["total"] == pytest.approx(6.0)
    first = answer["id"].removeprefix("chatcmpl-")
    assert [r.request_id for r in requests] == [sibling(first, n) for n in range(3)]
    assert [r.sampling.seed for r in requests] == [7, 8, 9]
    assert len({r.prompt_ids for r in requests}) == 1


async def test_choices_stream_interleaved_with_one_end_each(run_stack: Any) -> None:
    async with run_stack(three) as stack:
        events = await stack.events(n=3, stream_options={"include_usage": True})
    assert events[-1] == (None, "[DONE]")
    assert {number for number, _ in events} == {None}, "they cannot be resumed"
    chunks = [data for _, data in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    *said, total = chunks
    assert total["choices"] == []
    tokens = sum(len(stack.fleet.ids(words)) for words in WORDS)
    assert total["usage"]["completion_tokens"] == tokens
    choices = [chunk["choices"][0] for chunk in said]
    for number, words in enumerate(WORDS):
        own = [c for c in choices if c["index"] == number]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == words
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"
    order = [c["index"] for c in choices if c["delta"].get("content")]
    assert order != sorted(order), "they come as they are made"


async def one_fails(fleet: Any, request: Request) -> None:
    number = fleet.requests.index(request)
    fleet.say(request, fleet.ids("Hello"))
    if number == 1:
        while len(fleet.requests) < 3:
            await asyncio.sleep(0.005)
        fleet.say(request, [], index=1, end=EndReason.FAILED)


async def cancelled(stack: Any, *numbers: int) -> None:
    for number in numbers:

        async def marked(number: int = number) -> bool:
            record = await stack.fleet.record(stack.fleet.requests[number])
            return record is not None and record.state is RecordState.CANCELLING

        await stack.until(marked)


async def test_one_that_fails_is_one_error_and_ends_the_others(run_stack: Any) -> None:
    async with run_stack(one_fails) as stack:
        events = await stack.events(n=3)
        errors = [data for _, data in events if "error" in data]
        assert [e["error"]["code"] for e in errors] == ["failed"]
        assert events[-1][1] == errors[0], "no end mark: it is not whole"
        await cancelled(stack, 0, 2)


async def test_one_that_fails_fails_a_whole_answer(run_stack: Any) -> None:
    async with run_stack(one_fails) as stack:
        answer = await stack.chat(n=3)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "failed")
        await cancelled(stack, 0, 2)


async def never_ends(fleet: Any, request: Request) -> None:
    fleet.say(request, fleet.ids("Hello"))


async def test_a_client_that_leaves_cancels_all(run_stack: Any) -> None:
    async with run_stack(never_ends) as stack:
        async with stack.stream(n=3) as response:
            async for line in response.aiter_lines():
                if '"Hello"' in line:
                    break
        await stack.until(lambda: len(stack.fleet.requests) == 3)
        await cancelled(stack, 0, 1, 2)


async def test_every_choice_takes_a_place_or_none_does(run_stack: Any) -> None:
    async with run_stack(three, max_in_flight=3) as stack:
        full = await stack.chat(n=4)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert stack.fleet.requests == []
        assert (await stack.chat(n=3)).status_code == 200
        assert stack.gateway.admission.in_flight == 0


async def test_if_one_is_not_stored_the_others_are_taken_back(run_stack: Any) -> None:
    async with run_stack(never_ends) as stack:
        store, calls = stack.member.bus.store, []

        async def fills_up(*args: Any, **kwargs: Any) -> None:
            calls.append(args)
            if len(calls) == 2:
                raise StoreFull("no room")
            await store(*args, **kwargs)

        stack.member.bus.store = fills_up
        answer = await stack.chat(n=3)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "storage_full")
        assert len(calls) == 2
        await stack.until(lambda: stack.fleet.requests)
        await cancelled(stack, 0)


async def test_several_choices_cannot_be_resumed_and_say_so(run_stack: Any) -> None:
    async with run_stack(three) as stack:
        body, header = stack.body(n=2), {"x-diptych-resume": "1"}
        answer = await stack.client.post("/v1/chat/completions", json=body, headers=header)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_resumable")
        assert answer.json()["error"]["param"] == "n"
        assert stack.fleet.requests == []


def test_seeds_follow_one_another_within_64_bits() -> None:
    assert seeds(5, 3) == [5, 6, 7]
    assert seeds(2**63 - 1, 2) == [2**63 - 1, -(2**63)]
