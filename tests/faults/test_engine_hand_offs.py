"""Hand-offs whose KV the engines move themselves, through the whole fleet.

Every answer equals the engine's own, so no token
came twice and none is missing, and at the end nobody holds anything.
"""

import asyncio
from typing import Any

import msgspec
import pytest
import structlog

from diptych_bus.journal_items import journal_item
from diptych_contracts import subjects
from diptych_contracts.errors import EngineGone
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import LINK, FirstToken
from diptych_contracts.journal import EndReason, Started, TokenFrame
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import TOKENS
from diptych_telemetry.metrics import REGISTRY
from diptych_testkit.aftermath import journal_of, messages, nothing_is_left
from diptych_testkit.builders import MODEL, a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import toy_answer
from diptych_testkit.toy_request_engine import ToyRequestEngine, ToySettings, Wire

pytestmark = pytest.mark.virtual_time
DRAFTS = "vllm:spec_decode_num_accepted_tokens_total"
PROMPT = tuple(range(1, 101))
REMOTE = Forced(mode=Mode.REMOTE)
KINDS = {
    "first token of prefill": ToySettings(first_token=FirstToken.PREFILL),
    "first token of decode": ToySettings(first_token=FirstToken.DECODE),
    "paired up front": ToySettings(first_token=FirstToken.DECODE, pair_up_front=True),
}
each_kind = pytest.mark.parametrize("kind", list(KINDS))


def toys(kind: str, **changes: Any) -> ToySettings:
    chosen = KINDS[kind]
    known = {name: getattr(chosen, name) for name in ("first_token", "pair_up_front")}
    return ToySettings(**({"token_s": 0.002} | known | changes))


class Engines:
    """The engines of one fleet, which reach each other."""

    def __init__(self, fleet: SmallFleet) -> None:
        self._fleet = fleet
        self.wire = Wire()
        self.of: dict[str, ToyRequestEngine] = {}

    def worker(self, name: str, role: Role, settings: ToySettings, **more: Any) -> ToyRequestEngine:
        engine = self.of[name] = ToyRequestEngine(settings, wire=self.wire)
        self._fleet.worker(name, role, engine=engine, **more)
        return engine

    async def pair(self, settings: ToySettings, *decodes: str) -> None:
        self._fleet.scheduler()
        self.worker("p1", Role.PREFILL, settings)
        for name in decodes or ("d1",):
            self.worker(name, Role.DECODE, settings)
        await self._fleet.ready()

    def hold_nothing(self) -> None:
        for name, engine in self.of.items():
            if name in self._fleet.lives:
                assert not engine.held, name


async def is_whole(fleet: SmallFleet, request_id: str, tokens: int = 16) -> Any:
    end = await fleet.client.ended(request_id)
    assert (end.reason, end.tokens) == (EndReason.LENGTH, tokens), end
    assert fleet.client.delivered[request_id] == toy_answer(PROMPT, tokens)
    return end


def asked(request_id: str = "r1", tokens: int = 16, forced: Forced = REMOTE) -> Any:
    return a_request(
        request_id, prompt_ids=PROMPT, stopping=Stopping(max_tokens=tokens), forced=forced
    )


@each_kind
async def test_both_legs_give_the_engines_own_answer(kind: str) -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        await engines.pair(toys(kind))
        await fleet.client.send(asked())
        end = await is_whole(fleet, "r1")
        assert end.report is not None
        assert (end.report.mode, end.report.link) == (Mode.REMOTE, LINK)
        assert (end.report.prefill_worker, end.report.decode_worker) == (
            fleet.incarnation("p1"),
            fleet.incarnation("d1"),
        )
        await nothing_is_left(fleet)
        engines.hold_nothing()
        assert not engines.wire.pinned
        (prefill,), (decode,) = engines.of["p1"].asked, engines.of["d1"].asked
        assert decode.hand_off is not None
        told_first = KINDS[kind].first_token is FirstToken.PREFILL
        assert len(decode.answer_ids) == (1 if told_first else 0)
        assert not prefill.answer_ids


@each_kind
async def test_prefills_token_is_told_only_where_it_counts(kind: str) -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        await engines.pair(toys(kind))
        await fleet.client.send(asked())
        await is_whole(fleet, "r1")
        parts = journal_of(fleet, "r1")
        from_prefill = fleet.incarnation("p1")
        frames = [p for p in fleet_frames(fleet) if p.worker == from_prefill and p.entries]
        told_first = KINDS[kind].first_token is FirstToken.PREFILL
        assert bool(frames) is told_first
        (started,) = [p for p in parts if isinstance(p, Started)]
        assert started.worker == fleet.incarnation("d1")


def fleet_frames(fleet: SmallFleet) -> list[TokenFrame]:
    items = [journal_item(m.subject, m.seq, m.data) for m in messages(fleet, TOKENS.name)]
    return [i.entry for i in items if i is not None and isinstance(i.entry, TokenFrame)]


@each_kind
async def test_a_crowd_is_answered_without_a_repeat_or_a_gap(kind: str) -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        await engines.pair(toys(kind, delta_tokens=3), "d1", "d2")
        names = [f"r{n}" for n in range(12)]
        for name in names:
            await fleet.client.send(asked(name, 20))
        for name in names:
            await is_whole(fleet, name, 20)
        await nothing_is_left(fleet, names)
        engines.hold_nothing()


@each_kind
async def test_decodes_death_costs_no_token(kind: str) -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        await engines.pair(toys(kind, token_s=0.01), "d1", "d2")
        await fleet.client.send(asked(tokens=60))
        await fleet.client.has_tokens("r1", 10)
        (victim,) = [name for name in ("d1", "d2") if engines.of[name].held]
        await fleet.kill(victim)
        await is_whole(fleet, "r1", 60)
        again = engines.of["p1"].asked[-1]
        assert len(again.answer_ids) >= 10, "prompt and delivered tokens are prefilled again"
        await nothing_is_left(fleet)
        engines.hold_nothing()


@each_kind
async def test_prefills_death_while_it_computes_costs_no_token(kind: str) -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        await engines.pair(toys(kind, prefill_s=30.0))
        await fleet.client.send(asked(forced=Forced()))
        await until(lambda: bool(engines.of["p1"].held))
        engines.worker("p2", Role.PREFILL, toys(kind))
        await fleet.ready("p2")
        await fleet.kill("p1")
        await is_whole(fleet, "r1")
        await nothing_is_left(fleet)
        engines.hold_nothing()


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@each_kind
async def test_a_cancel_lets_go_of_both_legs(kind: str, stage: str) -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        slow = {"prefill": {"prefill_s": 30.0}, "decode": {"token_s": 0.02}}[stage]
        await engines.pair(toys(kind, **slow))
        request = asked(tokens=500)
        await fleet.client.send(request)
        if stage == "decode":
            await fleet.client.has_tokens("r1", 3)
        else:
            await until(lambda: bool(engines.of["p1"].held))
        fleet.client.cancel(request)
        end = await fleet.client.ended("r1")
        assert end.reason is EndReason.CANCELLED
        await nothing_is_left(fleet)
        engines.hold_nothing()


@pytest.mark.parametrize("victim", ["p1", "d1"])
@each_kind
async def test_a_failing_leg_ends_both_and_another_worker_goes_on(kind: str, victim: str) -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        fleet.scheduler()
        for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
            engines.worker(name, role, toys(kind)).faults.refuses = name == victim
        await fleet.ready()
        await fleet.client.send(asked())
        await until(lambda: bool(engines.of[victim].asked))
        other = engines.of[victim].faults
        await asyncio.sleep(0.05)
        other.refuses = False
        await is_whole(fleet, "r1")
        await nothing_is_left(fleet)
        engines.hold_nothing()


async def test_what_nobody_takes_is_an_orphan_until_the_engine_frees_it() -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        fleet.scheduler()
        settings = toys("first token of prefill", orphan_ms=1500)
        engines.worker("p1", Role.PREFILL, settings)
        engines.worker("d1", Role.DECODE, settings)
        await fleet.ready()
        gone = metric("diptych_kv_orphans_total")
        never_hear_of_jobs(fleet, "p1", "d1")
        request = asked()
        await fleet.client.send(request)
        await until(lambda: bool(engines.wire.pinned))
        fleet.client.cancel(request)
        await fleet.client.ended("r1")
        await until(lambda: metric("diptych_kv_orphans_total") == gone + 1)
        await until(lambda: metric("diptych_kv_pinned_orphans") >= 1)
        await until(lambda: metric("diptych_kv_pinned_orphans") == 0)
        assert not engines.wire.pinned


async def test_hand_offs_that_were_recomputed_are_counted() -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        engines.worker("d1", Role.DECODE, toys("first token of decode"))
        before = metric("diptych_kv_recomputed_total")
        engines.wire.recomputed = 2
        await until(lambda: metric("diptych_kv_recomputed_total") == before + 2)
        engines.wire.recomputed = 3
        await until(lambda: metric("diptych_kv_recomputed_total") == before + 3)


def never_hear_of_jobs(fleet: SmallFleet, asker: str, worker: str) -> None:
    """Have jobs that `asker` sends to `worker` wait for ever."""
    bus = fleet.lives[asker].bus
    ask = bus.request

    async def request(subject: str, *args: Any, **options: Any) -> Any:
        if subject == subjects.job(fleet.incarnation(worker)):
            await asyncio.Event().wait()
        return await ask(subject, *args, **options)

    bus.request = request  # type: ignore[method-assign]


async def test_versions_that_differ_never_pair_and_the_reason_is_told() -> None:
    with structlog.testing.capture_logs() as logged:
        async with small_fleet() as fleet:
            engines = Engines(fleet)
            fleet.scheduler()
            engines.worker("p1", Role.PREFILL, toys("first token of prefill", version="1"))
            engines.worker("d1", Role.DECODE, toys("first token of prefill", version="2"))
            await fleet.ready()
            await fleet.client.send(asked("r1", forced=Forced()))
            end = await is_whole(fleet, "r1")
            assert end.report is not None
            assert end.report.mode == Mode.LOCAL
            demanded = asked("r2")
            deadlines = msgspec.structs.replace(demanded.deadlines, first_token_s=1.0)
            await fleet.client.send(msgspec.structs.replace(demanded, deadlines=deadlines))
            end = await fleet.client.ended("r2")
            assert end.reason is EndReason.EXPIRED
            assert "hand_off.engine_version ('1', '2')" in end.detail
            assert not any(work.hand_off for work in engines.of["d1"].asked)
    told = [event for event in logged if event["event"] == "kv_incompatible"]
    assert "hand_off.engine_version" in told[0]["fields"][0]


@pytest.mark.parametrize("role", list(Role))
async def test_the_last_role_serves_alone(role: Role) -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        fleet.scheduler()
        engines.worker("w1", role, toys("paired up front"))
        await fleet.ready()
        await fleet.client.send(asked(forced=Forced()))
        await is_whole(fleet, "r1")


async def test_a_long_prompt_needs_no_slots() -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        fleet.scheduler()
        settings = toys("first token of prefill")
        engines.worker("p1", Role.PREFILL, settings, transfer_slots=1)
        engines.worker("d1", Role.DECODE, settings, transfer_slots=1)
        await fleet.ready()
        prompt = tuple(1 + n % 900 for n in range(1500))
        await fleet.client.send(a_request("r1", prompt_ids=prompt))
        end = await fleet.client.ended("r1")
        assert end.report is not None
        assert end.report.mode == Mode.REMOTE
        assert fleet.client.delivered["r1"] == toy_answer(prompt, 16)


async def test_a_dead_engine_costs_no_token_and_ends_its_worker_once_it_is_back() -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        settings = toys("first token of prefill", token_s=0.01)
        fleet.scheduler()
        engines.worker("p1", Role.PREFILL, settings)
        engines.worker("d2", Role.DECODE, settings)
        engine = ToyRequestEngine(settings, wire=engines.wire)
        ended: list[BaseException] = []
        engines.of["d1"] = engine
        fleet.worker("d1", Role.DECODE, engine=engine, ended=ended)
        await fleet.ready()
        names = [f"r{n}" for n in range(6)]
        for name in names:
            await fleet.client.send(asked(name, 60))
        await until(lambda: bool(engine.held))
        engine.faults.dead = "its process is gone"
        await until(lambda: not fleet.lives["d1"].member.vitals.readiness.ready)
        detail = fleet.lives["d1"].member.vitals.readiness.detail
        assert detail == "the engine is gone: its process is gone"
        for name in names:
            await is_whole(fleet, name, 60)
        await fleet.until_load(lambda: fleet.loads["d1"].draining)
        engine.faults.dead = None
        await until(lambda: bool(ended))
        assert isinstance(ended[0], EngineGone)
        assert not engine.held


async def test_accepted_drafts_are_counted() -> None:
    async with small_fleet() as fleet:
        engines = Engines(fleet)
        await engines.pair(toys("first token of decode", delta_tokens=4))
        before = metric(DRAFTS, model_name=MODEL)
        await fleet.client.send(asked(tokens=16))
        await is_whole(fleet, "r1")
        await until(lambda: metric(DRAFTS, model_name=MODEL) == before + 12)


async def until(holds: Any, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0
