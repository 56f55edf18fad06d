"""`/v1/embeddings` on the whole path: gateway, bus, workers."""

import asyncio
import base64
import json
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from diptych_contracts import subjects
from diptych_contracts.embeddings import (
    EmbedAnswer,
    EmbedCancel,
    EmbedJob,
    EmbedRefusal,
    EmbedRefused,
)
from diptych_contracts.events import RequestEnded
from diptych_contracts.fleet import Role
from diptych_contracts.keys import RateLimits
from diptych_contracts.streams import EVENTS
from diptych_engine.sim import EMBEDDING_SIZE, SimEmbedder
from diptych_gateway.texts import embedders, embedding, embedding_bodies
from diptych_policy import embedding as policy
from diptych_testkit.builders import MODEL
from diptych_testkit.keys import bearer, put_key
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.small_gateway import VOCAB_SIZE, SmallGateway, small_gateway
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_text.codec import TextCodec

TEXTS = ["hello world", "hello there", "quite another thing"]


class Gated(SimEmbedder):
    """Waits before each chunk, on the engine's thread, while it is held."""

    def __init__(self) -> None:
        super().__init__(max_tokens=4096)
        self.go, self.began = threading.Event(), threading.Event()

    def feed(self, token_ids: Any) -> None:
        self.began.set()
        assert self.go.wait(200)
        super().feed(token_ids)


def engine(*, gate: Gated | None = None) -> ToyStepEngine:
    made = ToyStepEngine(vocab_size=VOCAB_SIZE)
    if gate is not None:
        made.embedder = gate
    return made


@asynccontextmanager
async def serving(
    *workers: tuple[str, Role, Gated | None], **settings: Any
) -> AsyncIterator[tuple[SmallFleet, SmallGateway]]:
    async with small_fleet() as fleet:
        fleet.scheduler()
        for name, role, gate in workers:
            fleet.worker(name, role, engine=engine(gate=gate))
        await fleet.ready()
        async with small_gateway(fleet, "g1", **settings) as gateway:
            async with asyncio.timeout(60):
                while (await gateway.client.get("/v1/models")).json()["data"] == []:
                    await asyncio.sleep(0.02)
            await fleet.until_load(lambda: True)  # loads are heard
            yield fleet, gateway


async def embed(gateway: SmallGateway, given: Any, **more: Any) -> Any:
    return await gateway.post("/v1/embeddings", {"model": MODEL, "input": given, **more})


def expected(ids: list[int]) -> Any:
    sim = SimEmbedder(max_tokens=4096)
    sim.begin()
    sim.feed(ids)
    return sim.vector()


async def test_texts_and_token_ids_become_vectors_and_are_metered() -> None:
    codec = TextCodec.from_card(tiny_card())
    ids = [codec.encode(text) for text in TEXTS]
    async with serving(("p1", Role.PREFILL, None), ("d1", Role.DECODE, None)) as (fleet, gateway):
        answer = await embed(gateway, TEXTS)
        found = answer.json()
        assert answer.status_code == 200, found
        assert (found["object"], found["model"]) == ("list", MODEL)
        tokens = sum(map(len, ids))
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        for number, one in enumerate(found["data"]):
            assert (one["object"], one["index"]) == ("embedding", number)
            assert np.array_equal(np.float32(one["embedding"]), expected(ids[number]))
        coded = (await embed(gateway, ids, encoding_format="base64")).json()["data"]
        for number, one in enumerate(coded):
            data = base64.b64decode(one["embedding"])
            assert (
                list(struct.unpack(f"<{EMBEDDING_SIZE}f", data))
                == (found["data"][number]["embedding"])
            )
        single = (await embed(gateway, TEXTS[0], dimensions=EMBEDDING_SIZE, user="me")).json()
        assert single["data"] == found["data"][:1]
        events = [
            item.delivery.decode(RequestEnded)
            async for item in fleet.bus.all_stored(
                EVENTS.name, subject=subjects.event("request_ended")
            )
        ]
        assert [event.prompt_tokens for event in events] == [tokens, tokens, len(ids[0])]


async def test_many_inputs_go_in_several_parts_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "PART_TOKENS", 10)
    async with serving(("p1", Role.PREFILL, None)) as (_, gateway):
        inputs = [[1 + n % 90] * (1 + n % 7) for n in range(100)]
        found = (await embed(gateway, inputs)).json()["data"]
        for given, one in zip(inputs, found, strict=True):
            assert np.array_equal(np.float32(one["embedding"]), expected(given))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[1], [-1]]}, "input[1]"),
        ({"input": [10**6]}, "input"),
        ({"input": [[1], [1] * 5000]}, "input[1]"),
        ({"input": ["a", "hello " * 9000]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 63}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "64"}, "dimensions"),
        ({"input": "a", "mood": 1}, "mood"),
        ({}, "input"),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    async with serving(("p1", Role.PREFILL, None)) as (_, gateway):
        answer = await gateway.post("/v1/embeddings", {"model": MODEL, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error


async def test_more_tokens_than_a_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "MAX_INPUT_TOKENS", 100)
    assert embedding_bodies.MAX_INPUT_TOKENS == 65_536
    async with serving(("p1", Role.PREFILL, None)) as (_, gateway):
        answer = await embed(gateway, [[1] * 60, [1] * 60])
        assert "at most 100 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("other", [Role.PREFILL, Role.DECODE])
async def test_a_dead_workers_texts_are_computed_by_another(other: Role) -> None:
    gate = Gated()
    async with serving(("p1", Role.PREFILL, gate)) as (fleet, gateway):
        asking = asyncio.create_task(embed(gateway, TEXTS))
        assert await asyncio.to_thread(gate.began.wait, 60)
        fleet.worker("w2", other, engine=engine())
        await fleet.ready("w2")
        gate.go.set()
        await fleet.kill("p1")
        answer = await asking
        assert answer.status_code == 200
        assert len(answer.json()["data"]) == len(TEXTS)


async def test_a_client_that_leaves_is_worked_for_no_longer() -> None:
    gate = Gated()
    async with serving(("p1", Role.PREFILL, gate)) as (fleet, gateway):
        heard: list[EmbedCancel] = []
        await fleet.bus.subscribe(
            subjects.embed(fleet.incarnation("p1"), "cancel"),
            lambda delivery: heard.append(delivery.decode(EmbedCancel)),
        )
        asking = asyncio.create_task(embed(gateway, TEXTS))
        assert await asyncio.to_thread(gate.began.wait, 60)
        asking.cancel()
        async with asyncio.timeout(60):
            while not heard:
                await asyncio.sleep(0.02)
        gate.go.set()
        await fleet.until_load(lambda: fleet.loads["p1"].embedding_tokens == 0)
        assert (await embed(gateway, TEXTS)).status_code == 200


async def test_a_flood_is_told_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.EmbedRoom.__init__, "__defaults__", (2, 1000, 0, 0, 0.0))
    gate = Gated()
    async with serving(("p1", Role.PREFILL, gate)) as (_, gateway):
        asking = [asyncio.create_task(embed(gateway, TEXTS)) for _ in range(12)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        while len(done) < 10:
            done, _ = await asyncio.wait(asking, timeout=0.1)
        for one in done:
            answer = one.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        gate.go.set()
        statuses = [(await one).status_code for one in asking]
        assert statuses.count(200) == 2


async def test_a_draining_worker_finishes_and_takes_nothing_more() -> None:
    gate = Gated()
    async with serving(("p1", Role.PREFILL, gate), ("d1", Role.DECODE, None)) as (fleet, gateway):
        asking = asyncio.create_task(embed(gateway, TEXTS))
        assert await asyncio.to_thread(gate.began.wait, 60)
        leaving = fleet.lives.pop("p1")
        leaving.member.stopping.set()
        job = EmbedJob(
            request_id="r",  # type: ignore[arg-type]
            part=0,
            attempt=1,
            model=MODEL,
            texts=((1,),),
            budget_ms=1000,
        )
        async with asyncio.timeout(60):
            while True:
                answer = await fleet.bus.request(
                    subjects.embed(fleet.incarnation("p1"), "job"),
                    job,
                    EmbedAnswer,
                    timeout_s=60.0,
                )
                if isinstance(answer, EmbedRefused) and answer.reason is EmbedRefusal.DRAINING:
                    break
        assert (await embed(gateway, TEXTS)).status_code == 200
        gate.go.set()
        assert (await asking).status_code == 200
        await leaving.task


async def test_nobody_to_ask_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedders, "PATIENCE_S", 0.3)
    async with serving(("p1", Role.PREFILL, None)) as (fleet, gateway):
        await fleet.kill("p1")
        answer = await embed(gateway, TEXTS)
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


async def test_time_runs_out_as_a_504() -> None:
    gate = Gated()
    async with serving(("p1", Role.PREFILL, gate), embeddings_s=0.4) as (_, gateway):
        answer = await embed(gateway, TEXTS)
        gate.go.set()
        assert answer.status_code == 504


async def test_a_batch_of_embeddings() -> None:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": body}
        for n, body in enumerate(
            [{"model": MODEL, "input": TEXTS}, {"model": MODEL, "input": "x", "dimensions": 3}]
        )
    ]
    data = b"\n".join(json.dumps(line).encode() for line in lines)
    async with serving(("p1", Role.PREFILL, None)) as (_, gateway):
        file = await gateway.client.post(
            "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}
        )
        asked = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/embeddings",
            "completion_window": "24h",
        }
        batch = (await gateway.post("/v1/batches", asked)).json()
        async with asyncio.timeout(60):
            while batch["status"] != "completed":
                await asyncio.sleep(0.05)
                batch = (await gateway.client.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        content = await gateway.client.get(f"/v1/files/{batch['output_file_id']}/content")
        (found,) = content.text.splitlines()
        assert len(json.loads(found)["response"]["body"]["data"]) == len(TEXTS)


async def test_a_keys_tokens_per_minute_hold() -> None:
    async with serving(("p1", Role.PREFILL, None)) as (fleet, gateway):
        limits = RateLimits(tokens_per_minute=100)
        key = bearer(await put_key(fleet.bus, "k1", tenant="acme", limits=limits))
        async with asyncio.timeout(60):
            while (await gateway.client.get("/v1/models", headers=key)).status_code != 200:
                await asyncio.sleep(0.02)
        body = {"model": MODEL, "input": [[1] * 30, [2] * 30]}
        first = await gateway.post("/v1/embeddings", body, **key)
        assert first.status_code == 200, first.text
        # it fills up again meanwhile, by 1.7 a second
        assert 39 <= int(first.headers["x-ratelimit-remaining-tokens"]) < 60
        assert (await gateway.post("/v1/embeddings", body, **key)).status_code == 429
        assert (await gateway.post("/v1/embeddings", body)).status_code == 401
