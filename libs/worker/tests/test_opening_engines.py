"""A worker put in front of an engine: it waits for it, and its card says what the engine can do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import msgspec
import pytest

from diptych_bus.memory import MemoryBroker
from diptych_chassis.member import Member
from diptych_contracts.errors import EngineGone, Permanent
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation
from diptych_engine import adapters
from diptych_engine.adapters import AdapterSettings
from diptych_engine.sim_card import sim_card
from diptych_testkit.toy_request_engine import ToyRequestEngine
from diptych_worker import assembling
from diptych_worker.assembling import offered_card, open_engine
from diptych_worker.settings import WorkerSettings

TRIES: list[ToyRequestEngine] = []
GIVEN: list[AdapterSettings] = []


def make_late(settings: AdapterSettings) -> ToyRequestEngine:
    """An engine that answers at the third try."""
    GIVEN.append(settings)
    engine = ToyRequestEngine()
    TRIES.append(engine)
    engine.faults.dead = None if len(TRIES) > 2 else "connection refused"
    return engine


def make_broken(settings: AdapterSettings) -> ToyRequestEngine:
    engine = make_late(settings)
    engine.faults.never_works = True
    return engine


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    TRIES.clear()
    GIVEN.clear()
    names = {"late": f"{__name__}:make_late", "broken": f"{__name__}:make_broken"}
    monkeypatch.setattr(adapters, "ADAPTERS", names)
    monkeypatch.setattr("diptych_worker.settings.ADAPTERS", names)
    monkeypatch.setattr(assembling, "_AGAIN_S", 0.01)
    return names


@asynccontextmanager
async def a_member() -> AsyncIterator[Member]:
    bus = MemoryBroker().connect("w")
    yield Member(service="decode-worker", incarnation=Incarnation("w-1"), bus=bus, rng=Random(1))
    await bus.close()


@pytest.mark.usefixtures("known")
async def test_a_worker_waits_for_its_engine_and_says_so() -> None:
    settings = WorkerSettings(engine="late", engine_url="grpc://h:1", engine_model="llama")
    async with a_member() as member:
        engine = await open_engine(member, settings, Role.DECODE, sim_card(model="m"))
        assert member.vitals.readiness.detail == "waits for its engine: connection refused"
    assert (len(TRIES), engine.spec.engine) == (3, "toy-requests-1")
    given = GIVEN[0]
    assert (given.url, given.engine_model, given.role) == ("grpc://h:1", "llama", Role.DECODE)
    engine.stop()
    assert all(tried.closed for tried in TRIES)


@pytest.mark.usefixtures("known")
async def test_one_that_never_works_is_told_at_once() -> None:
    async with a_member() as member:
        settings = WorkerSettings(engine="broken")
        with pytest.raises(Permanent, match="told so"):
            await open_engine(member, settings, Role.DECODE, sim_card(model="m"))


@pytest.mark.usefixtures("known")
async def test_it_can_be_stopped_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembling, "_AGAIN_S", 60.0)
    async with a_member() as member:
        settings = WorkerSettings(engine="late")
        opening = asyncio.create_task(
            open_engine(member, settings, Role.DECODE, sim_card(model="m"))
        )
        await asyncio.sleep(0.05)
        member.stopping.set()
        with pytest.raises(EngineGone, match="told to stop"):
            await opening


def test_a_card_says_what_its_engine_can_do() -> None:
    spec = ToyRequestEngine().spec
    card = offered_card(sim_card(model="m"), replace(spec, unsupported=("response_format",)))
    assert (card.context_tokens, card.grammars) == (4096, True)
    both = replace(spec, unsupported=("response_format", "tool_choice"))
    assert not offered_card(msgspec.structs.replace(card), both).grammars
