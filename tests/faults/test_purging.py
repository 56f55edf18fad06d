"""A purged tenant: nothing of it is found, nobody of it is let in, nobody else is touched."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from diptych_bus.memory import MemoryBroker
from diptych_chassis.orders import Orders
from diptych_cli.identities import listed
from diptych_cli.joining import Sign
from diptych_cli.purging import Patience, Purged, purge
from diptych_cli.tenant_data import survey
from diptych_contracts import subjects
from diptych_contracts.batches import FILE_PART_BYTES
from diptych_contracts.control import ForgetAnswer, ForgetTenant, TenantKept
from diptych_contracts.dead import Cause, DeadRequest
from diptych_contracts.errors import BusAway
from diptych_contracts.fleet import Role
from diptych_contracts.fleet import WorkerRegistration as Registered
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.keys import RateLimits
from diptych_contracts.requests import Request
from diptych_contracts.sampling import Sampling, Stopping
from diptych_contracts.streams import DEAD_PROMPTS, PROMPTS, REQUESTS, WORKERS
from diptych_testkit.builders import MODEL
from diptych_testkit.keys import bearer, put_key, put_tenant
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.small_gateway import VOCAB_SIZE, SmallGateway, small_gateway
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_text.codec import TextCodec

CHAT, RESPONSES, FILES, BATCHES = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/files",
    "/v1/batches",
)
CACHING = {"vocab_size": VOCAB_SIZE, "prefix_sequences": 8}
QUICK = Patience(known_s=0.3, ended_s=60.0, summed_s=60.0)
OURS, THEIRS = "xylophone", "marimba"
"""What the tenant that goes has written, and the one that stays."""


def as_a(fleet: SmallFleet, role: str) -> Sign:
    """Gives orders as one of the small fleet's bus, where nobody has an identity."""
    orders = Orders(Incarnation("somebody"), role, unix_ms=fleet.bus.unix_ms, identity=None)
    epoch = time.time_ns()
    return lambda subject, body: orders.signed(subject, body, epoch=epoch, valid_ms=30_000)


async def purged(
    fleet: SmallFleet, *, keep_usage: bool = False, patience: Patience = QUICK
) -> Purged:
    sign = as_a(fleet, "operator")
    return await purge(fleet.bus, "acme", keep_usage=keep_usage, sign=sign, patience=patience)


class Party:
    """A tenant with a bit of everything."""

    def __init__(self, gateway: SmallGateway, tenant: str, key: str, mark: str) -> None:
        self.gateway, self.tenant, self.key, self.mark = gateway, tenant, key, mark
        self.response = self.resumable = self.file = self.batch = ""

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        answer = await self.gateway.client.post(path, json=body, headers=bearer(self.key) | headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, **changes: Any) -> dict[str, Any]:
        said = [{"role": "user", "content": f"{self.mark} " * 20}]
        return {"model": MODEL, "messages": said, "max_tokens": 8, **changes}

    async def live(self) -> None:
        """Ask for everything that leaves something behind, and wait until it is there."""
        await self.post(CHAT, self.chat(), **{"Idempotency-Key": f"once-{self.mark}"})
        told = await self.post(CHAT, self.chat(), **{"x-diptych-resume": "1"})
        self.resumable = told["id"]
        asked = {"model": MODEL, "input": self.mark, "metadata": {"a": self.mark}}
        stored = await self.post(RESPONSES, {**asked, "max_output_tokens": 8})
        self.response = stored["id"]
        long = {**asked, "input": self.mark + " " * 300_000, "max_output_tokens": 8}
        refused = await self.gateway.client.post(RESPONSES, json=long, headers=bearer(self.key))
        assert refused.status_code == 400  # longer than the context
        await self._batch()

    async def _batch(self) -> None:
        line = {"custom_id": self.mark, "method": "POST", "url": CHAT, "body": self.chat()}
        data = json.dumps(line).encode() + b"\n"
        data += b" " * (FILE_PART_BYTES + 10)
        upload = {"file": (f"{self.mark}.jsonl", data)}
        answer = await self.gateway.client.post(
            FILES, files=upload, data={"purpose": "batch"}, headers=bearer(self.key)
        )
        assert answer.status_code == 200, answer.text
        self.file = answer.json()["id"]
        wanted = {"input_file_id": self.file, "endpoint": CHAT, "completion_window": "24h"}
        made = await self.post(BATCHES, {**wanted, "metadata": {"b": self.mark}})
        self.batch = made["id"]
        async with asyncio.timeout(60):
            while made["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.05)
                made = (await self.get(f"{BATCHES}/{self.batch}")).json()

    async def get(self, path: str) -> Any:
        return await self.gateway.client.get(path, headers=bearer(self.key))


async def start(fleet: SmallFleet, **engine: Any) -> None:
    fleet.scheduler()
    fleet.worker("d", Role.DECODE, engine=ToyStepEngine(**{**CACHING, **engine}))
    await fleet.ready()


@asynccontextmanager
async def stack(**engine: Any) -> AsyncIterator[tuple[SmallFleet, SmallGateway]]:
    async with small_fleet(MemoryBroker()) as fleet:
        await start(fleet, **engine)
        async with small_gateway(fleet, "g1") as gateway:
            yield fleet, gateway


async def party(fleet: SmallFleet, gateway: SmallGateway, tenant: str, mark: str) -> Party:
    await put_tenant(fleet.bus, tenant, RateLimits(tokens_per_minute=10**9))
    key = await put_key(fleet.bus, f"key{tenant}", tenant=tenant)
    made = Party(gateway, tenant, key, mark)
    async with asyncio.timeout(60):
        while (await made.get("/v1/models")).status_code != 200:
            await asyncio.sleep(0.01)
    return made


async def bury_one(fleet: SmallFleet, tenant: str, mark: str) -> str:
    """A dead request with a long prompt kept beside it, and what a crash left of another."""
    request_id = RequestId(f"{tenant:0<32}")
    request = Request(
        request_id=request_id,
        gateway=Incarnation("g0"),
        model=MODEL,
        tenant=tenant,
        prompt_ids=tuple(ids_of(mark)),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=1),
        created_unix_ms=1,
    )
    died = DeadRequest(
        request_id=request_id,
        gateway=request.gateway,
        scheduler=Incarnation("s0"),
        cause=Cause.IMPOSSIBLE,
        detail="it would fail anywhere",
        request=request,
        died_unix_ms=1,
    )
    subject = subjects.dead_request(request_id)
    await fleet.bus.store(subject, died, msg_id=subject, timeout_s=60)
    for bucket in (DEAD_PROMPTS, PROMPTS):
        await fleet.bus.put_object(bucket, request_id, mark.encode())
    return request_id


def ids_of(mark: str) -> list[int]:
    return TextCodec.from_card(tiny_card()).encode(mark, add_bos=False)


def everything(broker: MemoryBroker) -> Iterator[tuple[str, bytes]]:
    """Every stored byte, by where it is."""
    for name, stream in broker.streams.items():
        for message in stream.after(0):
            yield f"{name} {message.subject}", message.data + repr(message.headers).encode()
    for name, bucket in broker._buckets.items():
        for key, value in bucket.values.items():
            yield f"{name}/{key}", value.data
    for where, data in broker.objects.items():
        yield "/".join(where), data


def found(broker: MemoryBroker, mark: str) -> set[str]:
    """Where a mark stands: as text, or as the tokens of a prompt or an answer."""
    packed = b"".join(map(msgspec.msgpack.encode, ids_of(mark)))
    wanted = (mark.encode(), packed)
    return {where for where, data in everything(broker) if any(w in data for w in wanted)}


def streams_of(places: set[str]) -> set[str]:
    return {place.split()[0].split("/")[0] for place in places}


async def test_nothing_of_it_is_left_and_the_others_are_whole() -> None:
    async with stack() as (fleet, gateway):
        ours = await party(fleet, gateway, "acme", OURS)
        theirs = await party(fleet, gateway, "rival", THEIRS)
        for each in (ours, theirs):
            await each.live()
            await bury_one(fleet, each.tenant, each.mark)
        before = found(fleet.broker, OURS)
        assert {"responses", "files", "batches", "DEAD", "file-parts"} <= streams_of(before)
        their_places = found(fleet.broker, THEIRS)
        ids = (await survey(fleet.bus, "acme")).ids
        assert len(ids) >= 5

        done = await purge(
            fleet.bus, "acme", keep_usage=False, sign=as_a(fleet, "operator"), patience=QUICK
        )

        assert done.unfinished == []
        assert found(fleet.broker, OURS) == set()
        for kind in ("keys", "responses", "files", "batches", "idempotency keys", "dead requests"):
            assert done.deleted[kind] > 0, (kind, done.deleted)
        assert done.cached_prefixes > 0
        named = {p for p, d in everything(fleet.broker) if any(i.encode() in d for i in ids)}
        assert streams_of(named) <= {"EVENTS", "TOKENS"}
        named = {p for p, d in everything(fleet.broker) if b"acme" in d}
        # The tombstone; events and audit name it; a gateway brings a share of a limit back.
        assert {p for p in named if not p.startswith("EVENTS")} <= {
            "keys/tenant.acme",
            "allowances/tenant.acme",
        }
        said = " ".join(done.remains)
        assert "75 min" in said
        assert "24 h" in said

        assert found(fleet.broker, THEIRS) == their_places
        assert (await theirs.get(f"{RESPONSES}/{theirs.response}")).status_code == 200
        assert (await theirs.get(f"{CHAT}/{theirs.resumable}")).status_code == 200
        assert (await theirs.get(f"{FILES}/{theirs.file}/content")).status_code == 200
        again = await theirs.post(CHAT, theirs.chat())
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_second_purge_finds_nothing_and_usage_may_be_kept() -> None:
    async with stack() as (fleet, gateway):
        ours = await party(fleet, gateway, "acme", OURS)
        await ours.post(CHAT, ours.chat())
        first = await purge(
            fleet.bus, "acme", keep_usage=True, sign=as_a(fleet, "operator"), patience=QUICK
        )
        async with asyncio.timeout(60):
            while not (await survey(fleet.bus, "acme")).days:
                await asyncio.sleep(0.1)
        kept = await purge(
            fleet.bus, "acme", keep_usage=True, sign=as_a(fleet, "operator"), patience=QUICK
        )
        assert kept.deleted == {}
        assert any("1 days of use" in line for line in kept.remains)
        last = await purge(
            fleet.bus, "acme", keep_usage=False, sign=as_a(fleet, "operator"), patience=QUICK
        )
        assert last.deleted == {"days of use": 1}
        assert (first.unfinished, kept.unfinished, last.unfinished) == ([], [], [])
        assert (await survey(fleet.bus, "acme")).days == []


async def told_by(events: AsyncIterator[bytes]) -> list[str]:
    return [line.decode() async for line in events if line.startswith(b"data: ")]


async def test_what_runs_is_cancelled_and_every_door_says_401() -> None:
    async with stack(step_s=0.02) as (fleet, gateway):
        ours = await party(fleet, gateway, "acme", OURS)
        theirs = await party(fleet, gateway, "rival", THEIRS)
        told = await ours.post(CHAT, ours.chat(), **{"x-diptych-resume": "1"})
        endless = ours.chat(stream=True, max_tokens=1500, ignore_eos=True)
        url = str(gateway.client.base_url).replace("http", "ws") + RESPONSES
        offers = ["diptych", f"diptych-api-key.{ours.key}"]
        running = asyncio.create_task(stream(ours, endless))
        others = asyncio.create_task(stream(theirs, theirs.chat(stream=True, max_tokens=200)))
        async with connect(url, subprotocols=offers) as socket:
            asked = {"type": "response.create", "model": MODEL, "input": OURS}
            await socket.send(json.dumps({**asked, "max_output_tokens": 1500}))
            assert "response.created" in str(await socket.recv())
            await asyncio.sleep(0.3)
            done = await purge(
                fleet.bus, "acme", keep_usage=False, sign=as_a(fleet, "operator"), patience=QUICK
            )
            assert done.unfinished == []
            assert "[DONE]" not in (await running)[-1]
            assert await last_type(socket) in ("response.failed", "response.incomplete", "error")
            await socket.send(json.dumps({**asked, "max_output_tokens": 4}))
            refusal = await answer_of(socket)
            assert refusal["status"] == 401
        assert "[DONE]" in (await others)[-1]
        await every_door_is_closed(ours, told["id"], url, offers)
        assert (await theirs.get("/v1/models")).status_code == 200
        assert found(fleet.broker, OURS) == set()
        async for item in fleet.bus.all_stored(REQUESTS.name, subject=REQUESTS.subjects[0]):
            assert item.delivery.decode(Request).tenant != "acme"


async def stream(party: Party, body: dict[str, Any]) -> list[str]:
    client = party.gateway.client
    async with client.stream("POST", CHAT, json=body, headers=bearer(party.key)) as answer:
        assert answer.status_code == 200
        return [line async for line in answer.aiter_lines() if line]


async def last_type(socket: Any) -> str:
    async with asyncio.timeout(60):
        while True:
            kind = str(json.loads(await socket.recv())["type"])
            if kind in ("response.failed", "response.incomplete", "response.completed", "error"):
                return kind


async def answer_of(socket: Any) -> Any:
    async with asyncio.timeout(60):
        return json.loads(await socket.recv())


async def every_door_is_closed(party: Party, resumable: str, url: str, offers: list[str]) -> None:
    for method, path, body in (
        ("POST", CHAT, party.chat()),
        ("POST", CHAT, party.chat(stream=True)),
        ("POST", RESPONSES, {"model": MODEL, "input": "x"}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "x"}),
        ("POST", "/v1/embeddings", {"model": MODEL, "input": "x"}),
        ("POST", "/tokenize", {"model": MODEL, "prompt": "x"}),
        ("GET", f"{CHAT}/{resumable}", None),
        ("GET", f"{CHAT}/{resumable}?stream=true&starting_after=1", None),
        ("GET", f"{RESPONSES}/{'resp_' + '0' * 32}?stream=true", None),
        ("GET", FILES, None),
        ("POST", BATCHES, {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}),
        ("GET", BATCHES, None),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
    ):
        answer = await party.gateway.client.request(
            method, path, json=body, headers=bearer(party.key)
        )
        assert answer.status_code == 401, (method, path, answer.text)
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert party.key not in answer.text
    with pytest.raises(InvalidStatus, match="401"):
        async with connect(url, subprotocols=offers):
            pass


async def test_without_schedulers_it_says_what_is_not_done() -> None:
    async with small_fleet(MemoryBroker()) as fleet, small_gateway(fleet, "g1"):
        request_id = await bury_one(fleet, "acme", OURS)
        async for item in fleet.bus.all_stored("DEAD", subject=subjects.DEADS):
            request = item.delivery.decode(DeadRequest).request
            assert request is not None
            subject = subjects.request(request.priority_class, request.model)
            await fleet.bus.store(subject, request, msg_id=request_id, timeout_s=60)
        patience = Patience(known_s=0.0, ended_s=0.5, summed_s=1.0)
        done: Purged = await purge(
            fleet.bus, "acme", keep_usage=False, sign=as_a(fleet, "operator"), patience=patience
        )
        assert done.unfinished == ["1 requests are cancelled and have not ended"]
        assert found(fleet.broker, OURS) == set()


async def test_only_an_operators_order_makes_workers_forget() -> None:
    async with stack() as (fleet, gateway):
        ours = await party(fleet, gateway, "acme", OURS)
        await ours.post(CHAT, ours.chat())
        order = ForgetTenant(tenant="acme")
        (worker, *_) = [kept.key for kept in await listed(fleet.bus.bucket(WORKERS, Registered))]
        subject = subjects.control(Incarnation(worker))
        forged = as_a(fleet, "decode-worker")(subject, order)
        told: ForgetAnswer = await fleet.bus.request(subject, forged, ForgetAnswer, timeout_s=60)
        assert isinstance(told, TenantKept)
        assert "forbidden" in told.reason
        with pytest.raises(BusAway):  # what is no order is not even answered
            await fleet.bus.request(subject, order, ForgetAnswer, timeout_s=1)
        again = await ours.post(CHAT, ours.chat())
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
