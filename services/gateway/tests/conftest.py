"""A whole gateway on a memory bus, and a scripted fleet behind it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import uvloop

from diptych_bus.memory import MemoryBroker
from diptych_chassis.member import Member
from diptych_contracts import subjects
from diptych_contracts.cards import KvLayout, ModelCard
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import Chances, End, EndReason, Fence, Report, TokenEntry, TokenFrame
from diptych_contracts.requests import Request, RequestRecord
from diptych_contracts.streams import MODELS, REQUEST_RECORDS, SCHEDULERS, WORKERS
from diptych_contracts.wire import encode
from diptych_gateway.app import assemble
from diptych_gateway.service import Gateway
from diptych_gateway.settings import GatewaySettings
from diptych_policy.voices import attempt_voice, owner_voice
from diptych_testkit.open_responses import check_conformity
from diptych_testkit.tiny_gguf import CONTEXT_TOKENS, tiny_card
from diptych_testkit.virtual_time import VirtualLoop
from diptych_text.codec import TextCodec

WORKER = Incarnation("decode-worker-00000000aaaa")
GATEWAY = Incarnation("gateway-00000000bbbb")
HANGS_S = 60.0
"""What takes longer never comes, however busy the machine."""
REPORT = Report(
    mode="remote",
    prefill_worker="prefill-worker-1",
    decode_worker=WORKER,
    link="shm",
    prefill_ms=3.0,
    transfer_ms=1.0,
    transfer_bytes=640,
    decode_ms=9.0,
    prefill_j=1.5,
    decode_j=0.5,
)

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
"""Connections end differently on the loop that gateways run on."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Any]:
    if item.get_closest_marker("virtual_time") is not None:
        return {"virtual": VirtualLoop}
    both = item.path.stem == "test_gateway_connections"
    return LOOPS if both else {"asyncio": LOOPS["asyncio"]}


Script = Callable[["Fleet", Request], Awaitable[None]]


@dataclass
class Fleet:
    """A scheduler and a worker in one, which say what a test scripts."""

    bus: Any
    card: ModelCard
    codec: TextCodec
    script: Script
    requests: list[Request] = field(default_factory=list)
    arrived: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    async def register(self) -> None:
        await self.bus.put_object(MODELS, subjects.escape(self.card.model), encode(self.card))
        offer = WorkerRegistration(
            worker=WORKER,
            role=Role.DECODE,
            engine="scripted",
            model=self.card.model,
            fingerprint=self.card.fingerprint,
            layout=KvLayout(
                layout_id="x", engine_build="x", block_tokens=64, slot_bytes=1, dtype="f16"
            ),
            endpoints=(),
            max_sequences=4,
            kv_tokens=4096,
            context_tokens=2048,
        )
        await self.bus.bucket(WORKERS, WorkerRegistration).put(WORKER, offer)

    async def run(self) -> None:
        subscription = await self.bus.pull(
            SCHEDULERS, self.arrived.put_nowait, paused=lambda: False
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    pulled = await self.arrived.get()
                    request = pulled.delivery.decode(Request)
                    await pulled.ack()
                    self.requests.append(request)
                    tasks.create_task(self.script(self, request))
        finally:
            await subscription.close()

    def ids(self, text: str) -> list[int]:
        return self.codec.encode(text, add_bos=False)

    def say(
        self,
        request: Request,
        ids: list[int],
        *,
        index: int = 0,
        attempt: int = 1,
        end: EndReason | None = None,
        logprobs: tuple[Chances, ...] = (),
    ) -> None:
        """One frame: tokens, and the end if there is one."""
        rid = request.request_id
        entry = TokenEntry(
            request_id=rid,
            attempt=attempt,
            index=index,
            token_ids=tuple(ids),
            logprobs=logprobs,
            voice=attempt_voice(request.secret, attempt),
        )
        ends = () if end is None else (self.end(request, end, attempt, index + len(ids)),)
        frame = TokenFrame(worker=WORKER, entries=(entry,) if ids else (), ends=ends)
        self.bus.append(request.gateway, frame)

    def end(self, request: Request, reason: EndReason, attempt: int, tokens: int | None) -> End:
        return End(
            request_id=request.request_id,
            attempt=attempt,
            reason=reason,
            tokens=tokens,
            report=REPORT,
            voice=attempt_voice(request.secret, attempt),
        )

    def fence(self, request: Request, attempt: int) -> None:
        voice = owner_voice(request.secret)
        fence = Fence(request_id=request.request_id, attempt=attempt, voice=voice)
        self.bus.append(request.gateway, fence)

    async def record(self, request: Request) -> RequestRecord | None:
        kept = await self.bus.bucket(REQUEST_RECORDS, RequestRecord).get(request.request_id)
        return None if kept is None else kept.value


@dataclass
class Stack:
    """The gateway under test, its fleet and a client."""

    gateway: Gateway
    member: Member
    fleet: Fleet
    client: httpx.AsyncClient
    base_url: str
    broker: MemoryBroker

    async def respond(self, **changes: Any) -> httpx.Response:
        return await self.client.post("/v1/responses", json=self.asked(**changes))

    def asked(self, **changes: Any) -> dict[str, Any]:
        return {"model": "tiny", "input": "Hello", **changes}

    async def read(
        self, path: str, after: int = -1, client: httpx.AsyncClient | None = None
    ) -> list[tuple[str | None, Any]]:
        """A whole stream of events by GET."""
        params = {"stream": "true"} | ({} if after < 0 else {"starting_after": str(after)})
        response = await (client or self.client).get(path, params=params)
        assert response.status_code == 200, response.text
        return parse_events(response.text)

    def another(self, name: str, **settings: Any) -> Any:
        """A second gateway on the same bus, inside an `async with`: its client."""
        return another_gateway(self.broker, name, **settings)

    async def chat(self, **changes: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=self.body(**changes))

    def stream(self, **changes: Any) -> Any:
        body = self.body(stream=True, **changes)
        return self.client.stream("POST", "/v1/chat/completions", json=body)

    async def events(self, **changes: Any) -> list[tuple[str | None, Any]]:
        """The whole stream as (id, data) pairs; data is parsed unless it is `[DONE]`."""
        async with self.stream(**changes) as response:
            assert response.status_code == 200, await response.aread()
            text = (await response.aread()).decode()
        return parse_events(text)

    def body(self, **changes: Any) -> dict[str, Any]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
        return {**body, **changes}

    async def until(self, condition: Callable[[], Any]) -> Any:
        return await until(condition)

    def pass_time(self, seconds: float) -> None:
        """Let answers, and the clients they wait for, be this much older."""
        self.gateway.in_flight.tick(seconds, connected=True)

    async def cancelled_or_not(self, request: Request) -> RequestRecord | None:
        """The record of `request` once nothing is on its way that would still change it."""
        assert await self.gateway.records.settled(HANGS_S)
        return await self.fleet.record(request)


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition`, plain or awaitable, holds; gives its value."""
    async with asyncio.timeout(HANGS_S):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.005)


def parse_events(text: str) -> list[tuple[str | None, Any]]:
    events = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if "data" in fields:
            data = fields["data"]
            events.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events


async def echo_hello(fleet: Fleet, request: Request) -> None:
    ids = fleet.ids("Hello world")
    for index, token in enumerate(ids):
        end = EndReason.STOP if index == len(ids) - 1 else None
        fleet.say(request, [token], index=index, end=end)


@asynccontextmanager
async def another_gateway(
    broker: MemoryBroker, name: str, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    member = Member(
        service="gateway", incarnation=Incarnation(name), bus=broker.connect(name), rng=Random(8)
    )
    with ThreadPoolExecutor(1) as executor:
        gateway = assemble(member, GatewaySettings(port=0, **settings), executor)
        async with asyncio.TaskGroup() as tasks:
            life = tasks.create_task(gateway.run())
            await until(lambda: member.vitals.readiness.ready and gateway.server.started)
            url = f"http://127.0.0.1:{gateway.server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=HANGS_S) as client:
                yield client
            member.stopping.set()
            await life
    await member.bus.close()


@asynccontextmanager
async def running(
    script: Script,
    *,
    context_tokens: int = CONTEXT_TOKENS,
    card: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    broker = MemoryBroker()
    rng = Random(7)
    made = msgspec.structs.replace(tiny_card(context_tokens=context_tokens), **(card or {}))
    member = Member(service="gateway", incarnation=GATEWAY, bus=broker.connect("gateway"), rng=rng)
    fleet = Fleet(broker.connect("fleet"), made, TextCodec.from_card(made), script)
    await fleet.register()
    with ThreadPoolExecutor(1) as executor:
        gateway = assemble(member, GatewaySettings(port=0, **settings), executor)
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(fleet.run())
            life = tasks.create_task(gateway.run())
            await until(lambda: member.vitals.readiness.ready and gateway.server.started)
            url = f"http://127.0.0.1:{gateway.server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=HANGS_S) as client:
                yield Stack(gateway, member, fleet, client, f"{url}/v1", broker)
            member.stopping.set()
            await life
            worker.cancel()
    await fleet.bus.close()
    await member.bus.close()


@pytest.fixture
def run_stack() -> Any:
    return running


@pytest.fixture
def conforms() -> Callable[[Any], None]:
    """Raises unless a response object or event is, strictly, what Open Responses says."""
    return check_conformity


@pytest.fixture
def hello() -> Script:
    return echo_hello


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running(echo_hello) as made:
        yield made
