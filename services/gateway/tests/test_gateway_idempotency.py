"""`Idempotency-Key`: the same key joins or repeats, and never runs twice."""

import asyncio
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from diptych_contracts.idempotency import Claim, ClaimState, claim_key
from diptych_contracts.journal import EndReason, TokenEntry, TokenFrame
from diptych_contracts.requests import PriorityClass
from diptych_contracts.streams import IDEMPOTENCY
from diptych_policy.voices import attempt_voice

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
TEXT = "Hello world and all the rest of it"


class Story:
    """A script that says some tokens, and the rest when it is told to go on."""

    def __init__(self, first: int = 2, end: EndReason = EndReason.STOP) -> None:
        self.first = first
        self.end = end
        self.going_on = asyncio.Event()

    async def __call__(self, fleet: Any, request: Any) -> None:
        ids = fleet.ids(TEXT)
        for index, token in enumerate(ids[: self.first]):
            fleet.say(request, [token], index=index)
        await self.going_on.wait()
        for index, token in enumerate(ids[self.first :], start=self.first):
            last = index == len(ids) - 1
            fleet.say(request, [token], index=index, end=self.end if last else None)


def keyed(key: str = "k1") -> dict[str, str]:
    return {"Idempotency-Key": key}


async def chat(stack: Any, key: str = "k1", client: Any = None, **changes: Any) -> httpx.Response:
    body = stack.body(**changes)
    answer: httpx.Response = await (client or stack.client).post(
        CHAT, json=body, headers=keyed(key)
    )
    return answer


async def first_line(answer: httpx.Response) -> None:
    async with aclosing(answer.aiter_lines()) as heard:  # type: ignore[type-var]
        await anext(heard)


async def the_claim(stack: Any, state: ClaimState, key: str = "k1", endpoint: str = CHAT) -> Claim:
    bucket = stack.fleet.bus.bucket(IDEMPOTENCY, Claim)

    async def found() -> Any:
        kept = await bucket.get(claim_key("default", endpoint, key))
        return kept is not None and kept.value.state is state and kept.value

    claim: Claim = await stack.until(found)
    return claim


def lines(answer: httpx.Response) -> list[str]:
    return [line for line in answer.text.splitlines() if line.startswith(("data:", "id:"))]


async def test_the_same_key_repeats_the_same_answer(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        first, second = await chat(stack), await chat(stack)
        assert first.status_code == second.status_code == 200
        one, two = first.json(), second.json()
        one["usage"].pop("diptych"), two["usage"].pop("diptych")
        assert one == two
        assert len(stack.fleet.requests) == 1
        await the_claim(stack, ClaimState.ENDED)
        third = (await chat(stack)).json()
        third["usage"].pop("diptych")
        assert third == one
        assert len(stack.fleet.requests) == 1


async def test_a_stream_is_joined_from_its_first_token(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack:
        asked = {"stream": True, "stream_options": {"include_usage": False}}
        one = asyncio.create_task(chat(stack, **asked))
        await stack.until(lambda: stack.fleet.requests)
        async with stack.another("gateway-00000000dddd") as other:
            here = asyncio.create_task(chat(stack, **asked))
            there = asyncio.create_task(chat(stack, client=other, **asked))
            await stack.until(lambda: len(stack.gateway.in_flight) == 2)
            await asyncio.sleep(0.1)
            story.going_on.set()
            first, second, third = await one, await here, await there
            assert lines(first) == lines(second) == lines(third)
            assert lines(first)[-1] == "data: [DONE]"
            await the_claim(stack, ClaimState.ENDED)
            assert lines(await chat(stack, client=other, **asked)) == lines(first)
        assert len(stack.fleet.requests) == 1


async def test_who_lost_its_stream_asks_again_and_runs_nothing_twice(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack:
        body = stack.body(stream=True)
        async with stack.client.stream("POST", CHAT, json=body, headers=keyed()) as cut_off:
            await first_line(cut_off)
        again = asyncio.create_task(chat(stack, stream=True))
        await stack.until(lambda: len(stack.gateway.in_flight) == 1)
        story.going_on.set()
        assert lines(await again)[-1] == "data: [DONE]"
        assert len(stack.fleet.requests) == 1


async def test_an_answer_that_nobody_heard_is_kept(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack:
        body = stack.body(stream=True)
        async with stack.client.stream("POST", CHAT, json=body, headers=keyed()) as cut_off:
            await first_line(cut_off)
        await stack.until(lambda: not len(stack.gateway.in_flight))
        story.going_on.set()
        claim = await the_claim(stack, ClaimState.ENDED)
        assert claim.answer is not None
        assert list(claim.answer.entry.token_ids) == stack.fleet.ids(TEXT)


async def test_another_body_is_a_conflict_that_is_not_repeated(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        assert (await chat(stack)).status_code == 200
        other = await chat(stack, temperature=0.5)
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "idempotency_key_in_use"
        assert other.headers["x-should-retry"] == "false"
        assert len(stack.fleet.requests) == 1


async def test_another_key_and_no_key_run_anew(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        ids = {(await chat(stack, key)).json()["id"] for key in ("a", "b", "a")}
        ids |= {(await stack.chat()).json()["id"] for _ in range(2)}
        assert len(ids) == len(stack.fleet.requests) == 4


@pytest.mark.parametrize("key", ["", "x" * 256, "two words", "ümlaut"])
async def test_what_is_no_key_is_refused(run_stack: Any, hello: Any, key: str) -> None:
    async with run_stack(hello) as stack:
        headers = {b"idempotency-key": key.encode()}
        answer = await stack.client.post(CHAT, json=stack.body(), headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "Idempotency-Key"
        assert not stack.fleet.requests


async def test_a_refused_request_leaves_its_key_free(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        refused = await chat(stack, max_tokens=10**6)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        await the_claim(stack, ClaimState.FREE)
        assert (await chat(stack)).status_code == 200


async def test_a_failed_request_leaves_its_key_free(run_stack: Any) -> None:
    story = Story(first=0, end=EndReason.FAILED)
    story.going_on.set()
    async with run_stack(story) as stack:
        assert (await chat(stack)).status_code == 500
        await the_claim(stack, ClaimState.FREE)
        story.end = EndReason.STOP
        assert (await chat(stack)).status_code == 200
        assert len(stack.fleet.requests) == 2


async def test_a_long_answer_is_kept_apart(run_stack: Any) -> None:
    async def long(fleet: Any, request: Any) -> None:
        fleet.say(request, [130] * 140_000, end=EndReason.STOP)

    async with run_stack(long, context_tokens=300_000) as stack:
        first = await chat(stack, max_tokens=140_000)
        claim = await the_claim(stack, ClaimState.ENDED)
        assert claim.answer is None
        assert claim.part is not None
        second = await chat(stack, max_tokens=140_000)
        assert second.json()["choices"] == first.json()["choices"]
        assert len(stack.fleet.requests) == 1


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_is_the_same_response(
    run_stack: Any, hello: Any, store: bool, conforms: Any
) -> None:
    async with run_stack(hello) as stack:
        body = stack.asked(store=store)
        first = await stack.client.post(RESPONSES, json=body, headers=keyed())
        await the_claim(stack, ClaimState.ENDED, endpoint=RESPONSES)
        second = await stack.client.post(RESPONSES, json=body, headers=keyed())
        assert first.status_code == second.status_code == 200
        one, two = first.json(), second.json()
        conforms(two)
        one["usage"].pop("diptych", None), two["usage"].pop("diptych", None)
        assert one == two
        assert len(stack.fleet.requests) == 1


async def test_a_response_that_streams_is_joined(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack:
        body = stack.asked(stream=True)

        async def ask(client: Any) -> list[str]:
            return lines(await client.post(RESPONSES, json=body, headers=keyed()))

        one = asyncio.create_task(ask(stack.client))
        await stack.until(lambda: stack.fleet.requests)
        async with stack.another("gateway-00000000dddd") as other:
            two = asyncio.create_task(ask(other))
            await asyncio.sleep(0.1)
            story.going_on.set()
            assert await one == await two
        assert len(stack.fleet.requests) == 1


async def test_endpoints_do_not_share_keys(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        assert (await chat(stack)).status_code == 200
        answer = await stack.client.post(RESPONSES, json=stack.asked(), headers=keyed())
        assert answer.status_code == 200
        assert len(stack.fleet.requests) == 2
        assert {r.priority_class for r in stack.fleet.requests} == {PriorityClass.INTERACTIVE}


def choices(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


async def test_several_answers_are_repeated_each(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        first, second = await chat(stack, n=3), await chat(stack, n=3)
        assert choices(first) == choices(second)
        assert first.json()["id"] == second.json()["id"]
        assert len(stack.fleet.requests) == 3
        body = stack.body(n=3, stream=True)
        streams = [await stack.client.post(CHAT, json=body, headers=keyed("k2")) for _ in range(2)]
        assert sorted(lines(streams[0])) == sorted(lines(streams[1]))
        assert len(stack.fleet.requests) == 6


async def test_completions_have_keys_too(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        body = {"model": "tiny", "prompt": ["Hello", "World"], "n": 2}
        answers = [
            await stack.client.post("/v1/completions", json=body, headers=keyed()) for _ in range(2)
        ]
        assert choices(answers[0]) == choices(answers[1])
        assert len(choices(answers[0])) == 4
        assert len(stack.fleet.requests) == 4


async def test_logprobs_are_kept_with_their_tokens(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        ids = fleet.ids("Hello world")
        chances = tuple(((token, -0.25), (7, -1.5)) for token in ids)
        entry = TokenEntry(
            request_id=request.request_id,
            attempt=1,
            index=0,
            token_ids=tuple(ids),
            logprobs=chances,
            voice=attempt_voice(request.secret, 1),
        )
        end = fleet.end(request, EndReason.STOP, 1, len(ids))
        frame = TokenFrame(worker="decode-worker-1", entries=(entry,), ends=(end,))
        fleet.bus.append(request.gateway, frame)

    async with run_stack(script) as stack:
        asked = {"logprobs": True, "top_logprobs": 1}
        first = choices(await chat(stack, **asked))
        await the_claim(stack, ClaimState.ENDED)
        assert first[0]["logprobs"]["content"][0]["logprob"] == -0.25
        assert choices(await chat(stack, **asked)) == first
        assert len(stack.fleet.requests) == 1
