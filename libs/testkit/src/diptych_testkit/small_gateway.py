"""A real gateway on a small fleet's bus, with its front door on a free port."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import httpx

from diptych_bus.memory import MemoryBus
from diptych_chassis.member import Member
from diptych_chassis.repeating import every
from diptych_contracts import subjects
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation
from diptych_gateway.app import assemble
from diptych_gateway.settings import GatewaySettings
from diptych_testkit.small_fleet import SmallFleet
from diptych_testkit.tiny_gguf import tiny_card

_BEAT_S = 0.1
_READY_S = 60.0
VOCAB_SIZE = tiny_card().vocab_size
"""Of an engine that says only what the small fleet's card can spell."""


class SmallGateway:
    """One gateway and a client of it."""

    def __init__(self, member: Member, bus: MemoryBus, life: asyncio.Task[None]) -> None:
        self.member = member
        self._bus = bus
        self._life = life
        self.client: httpx.AsyncClient

    @property
    def incarnation(self) -> Incarnation:
        """Whose journal its requests are in."""
        return self.member.incarnation

    async def kill(self) -> None:
        """End its life without a word: nothing it does on its way out reaches the bus."""
        await self._bus.kill()
        await self.client.aclose()
        await self.end()

    async def fail(self) -> None:
        """End its life as the chassis does where the bus is gone for good."""
        self._life.cancel()
        await asyncio.wait([self._life])

    async def end(self) -> None:
        """Have it stop, if it lives."""
        self.member.stopping.set()
        await asyncio.wait([self._life])
        await self._bus.close()

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """Ask; the answer is whole."""
        return await self.client.post(path, json=body, headers=headers)

    async def events(self, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[Any]:
        """The events of a stream, by POST or (without a body) GET, until it or its gateway ends."""
        method = "GET" if body is None else "POST"
        async with self.client.stream(method, path, json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def small_gateway(
    fleet: SmallFleet, name: str, **settings: Any
) -> AsyncIterator[SmallGateway]:
    """Gateway `name`, serving; stopped afterwards if it still lives."""
    bus = fleet.broker.connect(name)
    me = fleet.incarnation(name)
    member = Member(service="gateway", incarnation=me, bus=bus, rng=Random(name))
    with ThreadPoolExecutor(1) as executor:
        made = assemble(member, GatewaySettings(port=0, drain_s=0.2, **settings), executor)
        async with asyncio.TaskGroup() as tasks:
            life = tasks.create_task(made.run())
            beating = tasks.create_task(every(_BEAT_S, lambda: _beat(member)))
            gateway = SmallGateway(member, bus, life)
            async with asyncio.timeout(_READY_S):
                while not (member.vitals.readiness.ready and made.server.started):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{made.server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as gateway.client:
                yield gateway
            beating.cancel()
            await gateway.end()


async def _beat(member: Member) -> None:
    beat = Beat(member=member.incarnation, service="gateway", count=1, ready=True)
    await member.bus.publish(subjects.beat(member.incarnation), beat)
