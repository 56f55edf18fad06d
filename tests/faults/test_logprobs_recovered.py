"""Logprobs through a whole Diptych: exact, and the same whatever dies meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from diptych_contracts.fleet import Role
from diptych_contracts.jobs import DecodeJob
from diptych_contracts.journal import TokenFrame
from diptych_engine.sim import History
from diptych_testkit.aftermath import nothing_is_left
from diptych_testkit.builders import MODEL
from diptych_testkit.cut_fleet import CutFleet, cut_fleet, slow_engine
from diptych_testkit.interruptions import Call
from diptych_testkit.small_gateway import VOCAB_SIZE, SmallGateway, small_gateway
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import toy_logits
from diptych_text.codec import TextCodec

CHAT = "/v1/chat/completions"
CODEC = TextCodec.from_card(tiny_card())
TOKENS = 300


def chat(**more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": TOKENS,
        "temperature": 1.4,
        "seed": 11,
        "presence_penalty": 0.5,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 3,
        **more,
    }


def hands_over(call: Call) -> bool:
    return call.is_a(DecodeJob, kind="request")


def frame(call: Call) -> bool:
    return call.is_a(TokenFrame, kind="append") and bool(call.message.entries)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[CutFleet, SmallGateway]]:
    async with cut_fleet() as case:
        case.fleet.scheduler("s1")
        join(case, "p1", Role.PREFILL)
        join(case, "d1", Role.DECODE)
        await case.fleet.ready()
        async with small_gateway(case.fleet, "g1") as g1:
            yield case, g1


def join(case: CutFleet, name: str, role: Role) -> None:
    case.fleet.worker(name, role, engine=slow_engine(vocab_size=VOCAB_SIZE))


async def undisturbed(g1: SmallGateway, **more: Any) -> list[Any]:
    answer = await g1.post(CHAT, chat(**more))
    assert answer.status_code == 200, answer.text
    choices: list[Any] = answer.json()["choices"]
    return choices


class Streamed:
    """What a stream has said so far, by choice."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.told: dict[int, list[Any]] = {}
        self.attempt = 0
        self.some = asyncio.Event()

    async def read(self, g1: SmallGateway, **more: Any) -> None:
        options = {"include_usage": True}
        async for event in g1.events(CHAT, chat(stream=True, stream_options=options, **more)):
            assert "error" not in event, event
            for choice in event["choices"]:
                number, text = choice["index"], choice["delta"].get("content") or ""
                self.texts[number] = self.texts.get(number, "") + text
                if choice["logprobs"]:
                    self.told.setdefault(number, []).extend(choice["logprobs"]["content"])
            if event["usage"]:
                self.attempt = event["usage"]["diptych"]["attempt"]
            if sum(map(len, self.told.values())) > 20:
                self.some.set()

    def equals(self, choices: list[Any]) -> None:
        for choice in choices:
            number = choice["index"]
            assert self.texts[number] == choice["message"]["content"]
            assert self.told[number] == choice["logprobs"]["content"]
            assert len(self.told[number]) == TOKENS


async def test_they_are_the_log_softmax_of_the_models_logits() -> None:
    async with served() as (_, g1):
        (choice,) = await undisturbed(g1, max_tokens=40)
    told = choice["logprobs"]["content"]
    assert len(told) == 40
    history = History(CODEC.encode_chat([{"role": "user", "content": "Hello"}]))
    row = np.empty(VOCAB_SIZE, np.float32)
    for token in told:
        toy_logits(row, history)
        wide = row.astype(np.float64)
        expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        top = np.argsort(-wide, kind="stable")[:3]
        ranked = token["top_logprobs"]
        assert [t["logprob"] for t in ranked] == pytest.approx(expected[top].tolist(), abs=2e-6)
        for likely, at in zip(ranked, top.tolist(), strict=True):
            assert bytes(likely["bytes"]) == CODEC.token_bytes(at)
        near = np.flatnonzero(np.abs(expected - token["logprob"]) < 2e-6).tolist()
        (chosen,) = [t for t in near if CODEC.token_bytes(t) == bytes(token["bytes"])]
        history.tokens.append(chosen)


async def test_they_are_the_same_after_a_decode_worker_died() -> None:
    async with served() as (case, g1):
        expected = await undisturbed(g1)
        streamed = Streamed()
        reading = asyncio.create_task(streamed.read(g1))
        await streamed.some.wait()
        await case.fleet.kill("d1")
        join(case, "d2", Role.DECODE)
        await reading
        streamed.equals(expected)
        assert streamed.attempt == 2


async def test_they_are_the_same_for_each_of_several_choices() -> None:
    async with served() as (case, g1):
        expected = await undisturbed(g1, n=3)
        alone = [(await undisturbed(g1, seed=11 + n))[0] for n in range(3)]
        streamed = Streamed()
        reading = asyncio.create_task(streamed.read(g1, n=3))
        await streamed.some.wait()
        await case.fleet.kill("d1")
        join(case, "d2", Role.DECODE)
        await reading
        streamed.equals(expected)
    assert [{**c, "index": 0} for c in expected] == alone
    assert len({c["message"]["content"] for c in expected}) == 3


async def test_the_first_token_keeps_them_though_who_sampled_it_dies_untold() -> None:
    """The prefill worker's frame is lost with it: the decode worker says the token again."""
    async with served() as (case, g1):
        expected = await undisturbed(g1)
        lost = case.broker.lose("p1", frame)
        cut = case.broker.kill_after("p1", hands_over)
        streamed = Streamed()
        reading = asyncio.create_task(streamed.read(g1))
        await case.dies(cut)
        await reading
        assert lost.reached.is_set()
        streamed.equals(expected)
        assert streamed.attempt == 1


async def test_another_gateway_goes_on_after_an_event_with_the_same() -> None:
    """Its own gateway and a decode worker die: the rest of the events is byte for byte the same."""
    headers = {"x-diptych-resume": "1"}
    async with served() as (case, g1):
        async with small_gateway(case.fleet, "g2") as g2:
            body = chat(stream=True)
            seen: list[str] = []
            async with g1.client.stream("POST", CHAT, json=body, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    seen.append(line)
                    if len(seen) > 90:
                        break
            last = next(line for line in reversed(seen[:-2]) if line.startswith("id: "))
            await g1.kill()
            await case.fleet.kill("d1")
            join(case, "d2", Role.DECODE)
            rest = await g2.post(CHAT, body, **{"last-event-id": last.removeprefix("id: ")})
            assert rest.status_code == 200, rest.text
            expected = await undisturbed(g2)
        request_id, index = last.removeprefix("id: ").split(":")
        before = seen[: seen.index(last) + 2]
        chunks = [*before, *rest.text.split("\n")]
        told = [
            token
            for line in chunks
            if line.startswith("data: {")
            for choice in json.loads(line.removeprefix("data: "))["choices"]
            if choice["logprobs"]
            for token in choice["logprobs"]["content"]
        ]
        assert told == expected[0]["logprobs"]["content"]
        assert int(index) > 5
        await nothing_is_left(case.fleet, (request_id,), timeout_s=60)
