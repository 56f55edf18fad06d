"""The SGLang adapter against two servers that take nothing but the contract, and their rooms."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from diptych_contracts.errors import EngineGone, Incompatible, Permanent, Refused
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Grammar, Sampling, Stopping
from diptych_engine.adapters import AdapterSettings
from diptych_engine.over_http import client
from diptych_engine.port import Phase
from diptych_engine.sglang.engine import SglangEngine, make
from diptych_engine.sglang.options import SglangOptions
from diptych_engine.sglang.rooms import Room, Rooms, from_opaque, to_opaque
from diptych_testkit.fake_engines.sglang import FakeBootstrap, FakeSglang, SglangHabits
from diptych_testkit.fake_engines.strict_server import StrictServer
from diptych_testkit.fake_engines.works import a_work, adapter_settings, answer_of, deltas_of
from diptych_testkit.toy_engine import GREEDY, toy_answer

PROMPT = tuple(range(1, 50))


class Fleet:
    """Servers that end with the test, which fails if one of them saw a fault."""

    def __init__(self) -> None:
        self.bootstrap = FakeBootstrap()
        self.bootstrap.start()
        self.servers: list[StrictServer] = [self.bootstrap]

    def begin(self, mode: str = "null", **habits: object) -> FakeSglang:
        values = SglangHabits(mode=mode, **habits)  # type: ignore[arg-type]
        server = FakeSglang(self.bootstrap if mode != "null" else None, values)
        server.start()
        self.servers.append(server)
        return server


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    found = Fleet()
    yield found
    for server in found.servers:
        server.stop()
    assert [fault for server in found.servers for fault in server.faults] == []


def settings_of(server: FakeSglang) -> AdapterSettings:
    """Settings of the worker that belongs in front of `server`."""
    role = Role.PREFILL if server.habits.mode == "prefill" else Role.DECODE
    return adapter_settings("sglang", server.url, role=role)


@asynccontextmanager
async def adapter(server: FakeSglang, **options: object) -> AsyncIterator[SglangEngine]:
    values = SglangOptions(**({"start_s": 5.0} | options))  # type: ignore[arg-type]
    engine = SglangEngine(settings_of(server), values)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def pair(fleet: Fleet, **habits: object) -> AsyncIterator[tuple[SglangEngine, SglangEngine]]:
    prefill, decode = fleet.begin("prefill", **habits), fleet.begin("decode", **habits)
    async with adapter(prefill) as one, adapter(decode) as other:
        yield one, other


class Prefill:
    """A prefill under way, as the loop would have it."""

    def __init__(self, engine: SglangEngine, **changes: object) -> None:
        self._offers: asyncio.Queue[EngineHandOff] = asyncio.Queue()
        work = a_work(Phase.PREFILL, **changes)  # type: ignore[arg-type]
        self.task = asyncio.create_task(engine.prefill(work, self._offers.put_nowait))

    async def offer(self) -> EngineHandOff:
        async with asyncio.timeout(60):
            return await self._offers.get()


@pytest.mark.parametrize("cumulative", [True, False])
async def test_both_legs_meet_and_decode_answers(fleet: Fleet, *, cumulative: bool) -> None:
    async with pair(fleet, cumulative=cumulative, tokens_per_event=3) as (one, other):
        assert one.spec.hand_off == other.spec.hand_off
        assert one.spec.hand_off is not None
        assert one.spec.hand_off.pair_up_front
        leg = Prefill(one)
        offer = await leg.offer()
        assert not leg.task.done()
        answer = await answer_of(other, a_work(Phase.DECODE, hand_off=offer))
        assert answer == toy_answer(PROMPT, 8)
        assert (await leg.task).token_ids == ()
        assert fleet.bootstrap.holding() == 0


async def test_sixty_four_pairs_at_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 600.0)  # servers of this very process, on a busy day
    prompts = [tuple(range(n + 1, n + 20)) for n in range(64)]
    patient = {"silence_s": 600.0, "start_s": 600.0}
    prefill, decode = fleet.begin("prefill"), fleet.begin("decode")
    async with adapter(prefill, **patient) as one, adapter(decode, **patient) as other:

        async def answered(n: int) -> list[int]:
            leg = Prefill(one, request_id=f"r{n}", prompt_ids=prompts[n])
            work = a_work(
                Phase.DECODE,
                request_id=f"r{n}",
                prompt_ids=prompts[n],
                hand_off=await leg.offer(),
            )
            found = await answer_of(other, work)
            await leg.task
            return found

        answers = await asyncio.gather(*(answered(n) for n in range(64)))
    assert answers == [toy_answer(prompt, 8) for prompt in prompts]
    assert len(fleet.bootstrap.rooms) == 64


def test_no_room_is_used_twice() -> None:
    class Repeating:
        def __init__(self) -> None:
            self.left = [7, 7, 7, 8]

        def getrandbits(self, bits: int) -> int:
            assert bits == 63
            return self.left.pop(0)

    rooms = Rooms("h", 1, Repeating())  # type: ignore[arg-type]
    assert [rooms.fresh().room, rooms.fresh().room] == [7, 8]


def test_a_room_travels() -> None:
    room = Room(host="10.0.0.1", port=8998, room=2**63 - 1)
    assert from_opaque(to_opaque(room)) == room
    with pytest.raises(Incompatible):
        from_opaque(b"{}")


async def test_a_lone_server_answers_and_counts_its_cache(fleet: Fleet) -> None:
    async with adapter(fleet.begin()) as engine:
        deltas = await deltas_of(engine, a_work())
        assert [token for d in deltas for token in d.token_ids] == toy_answer(PROMPT, 8)
        assert deltas[-1].finish is EndReason.LENGTH
        assert deltas[0].cached_tokens == 0
        assert engine.spec.hand_off is None
        stats = await engine.stats()
        assert (stats.running, stats.kv_tokens_used) == (0, 100)


async def test_a_server_does_its_own_leg_only(fleet: Fleet) -> None:
    async with pair(fleet) as (one, other):
        with pytest.raises(Refused, match="does not do generate"):
            await answer_of(one, a_work())
        with pytest.raises(Refused, match="does not do prefill"):
            await Prefill(other).task


@pytest.mark.parametrize("cumulative", [True, False])
async def test_the_end_of_text_is_no_token_of_the_answer(fleet: Fleet, *, cumulative: bool) -> None:
    async with adapter(fleet.begin(eos_at=52, cumulative=cumulative)) as engine:
        deltas = await deltas_of(engine, a_work())
        assert [token for d in deltas for token in d.token_ids] == toy_answer(PROMPT, 3)
        assert deltas[-1].finish is EndReason.STOP
        ignoring = a_work(stopping=Stopping(max_tokens=8, ignore_eos=True))
        assert len(await answer_of(engine, ignoring)) == 8


@pytest.mark.parametrize("cumulative", [True, False])
async def test_logprobs_are_told_by_token(fleet: Fleet, *, cumulative: bool) -> None:
    work = a_work(max_tokens=3, sampling=msgspec.structs.replace(GREEDY, top_logprobs=2))
    async with adapter(fleet.begin(cumulative=cumulative)) as engine:
        for delta in await deltas_of(engine, work):
            (token,) = delta.token_ids
            chosen = (token, -0.125 * (token % 8))
            assert delta.logprobs == ((chosen, chosen, (token + 1, chosen[1] - 1)),)


async def test_every_parameter_is_part_of_the_contract(fleet: Fleet) -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias=((7, 1.5),),
        grammar=Grammar(kind="json_schema", text="{}"),
    )
    server = fleet.begin(deterministic=False)
    async with adapter(server) as engine:
        assert engine.spec.unsupported == ("seed",)
        await answer_of(engine, a_work(sampling=sampling, tenant="acme"))
        lark = msgspec.structs.replace(GREEDY, grammar=Grammar(kind="lark", text="start: /a/"))
        with pytest.raises(Permanent, match="Lark"):
            await answer_of(engine, a_work(sampling=lark))
    body = server.asked[-1][1]
    assert body["sampling_params"]["sampling_seed"] == -1
    assert "acme" not in body["extra_key"]


@pytest.mark.parametrize(
    ("habit", "error"),
    [("error_after", EngineGone), ("abort_after", EngineGone), ("cut_after", EngineGone)],
)
async def test_200_is_no_success(fleet: Fleet, habit: str, error: type[Exception]) -> None:
    """An error event, an abort told as the reason to finish, an end without one."""
    async with adapter(fleet.begin(**{habit: 2})) as engine:
        with pytest.raises(error):
            await answer_of(engine, a_work())


async def test_a_server_that_dies_is_gone(fleet: Fleet) -> None:
    async with adapter(fleet.begin(die_after=2)) as engine:
        with pytest.raises(EngineGone):
            await answer_of(engine, a_work())
        with pytest.raises(EngineGone):
            await engine.health()


async def test_a_decode_that_is_rejected_leaves_prefill_to_be_cancelled(fleet: Fleet) -> None:
    prefill, decode = fleet.begin("prefill"), fleet.begin("decode", reject=400)
    async with adapter(prefill) as one, adapter(decode) as other:
        leg = Prefill(one)
        work = a_work(Phase.DECODE, hand_off=await leg.offer())
        with pytest.raises(Permanent, match="400"):
            await answer_of(other, work)
        await _until(lambda: prefill.running == 1)
        leg.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leg.task
        assert prefill.aborted == {"r1.1."}
        await _until(lambda: prefill.running == 0)
        assert fleet.bootstrap.holding() == 0


async def test_a_prefill_that_is_aborted_fails_decode(fleet: Fleet) -> None:
    async with pair(fleet, hangs=True) as (one, other):
        leg = Prefill(one)
        work = a_work(Phase.DECODE, hand_off=await leg.offer())
        answer = asyncio.create_task(answer_of(other, work))
        await _until(lambda: len(fleet.bootstrap.rooms) == 1)
        leg.task.cancel()
        await asyncio.gather(leg.task, return_exceptions=True)
        prefill, decode = fleet.servers[1:]
        await _until(lambda: prefill.running == 0)  # type: ignore[attr-defined]
        decode.habits.hangs = False  # type: ignore[attr-defined]
        with pytest.raises((EngineGone, Refused)):
            await answer


async def test_a_cancelled_answer_is_aborted_by_name(fleet: Fleet) -> None:
    async with pair(fleet, step_s=0.02) as (one, other):
        leg = Prefill(one)
        work = a_work(Phase.DECODE, max_tokens=500, hand_off=await leg.offer())
        async with aclosing(other.generate(work)) as stream:
            await anext(stream)
        await leg.task
        decode = fleet.servers[2]
        assert isinstance(decode, FakeSglang)
        assert decode.aborted == {"r1.1."}
        await _until(lambda: decode.running == 0)


async def test_prefill_is_ready_once_its_ranks_have_registered(fleet: Fleet) -> None:
    fleet.bootstrap.registered = False
    server = fleet.begin("prefill")
    with pytest.raises(EngineGone, match="503"):
        async with adapter(server, start_s=1.0):
            pass
    starting = asyncio.create_task(_started(server))
    await asyncio.sleep(0.1)
    assert not starting.done()
    fleet.bootstrap.registered = True
    engine = await starting
    await engine.health()
    fleet.bootstrap.registered = False
    with pytest.raises(EngineGone, match="bootstrap"):
        await engine.health()
    await engine.close()


async def test_health_has_a_token_made(fleet: Fleet) -> None:
    server = fleet.begin()
    async with adapter(server, probe_s=0.0) as engine:
        await engine.health()
        assert server.asked[-1][0] == "health_generate"


@pytest.mark.parametrize("habit", [{"reject": 500}, {"die_after": 0}])
async def test_a_partner_that_fails_is_no_wait_for_its_room(
    fleet: Fleet, habit: dict[str, int]
) -> None:
    """Decode waits where prefill never comes, for as long as it is let."""
    prefill, decode = fleet.begin("prefill"), fleet.begin("decode")
    asked = {"prefill_url": prefill.url, "bootstrap_port": fleet.bootstrap.port}
    async with adapter(decode, silence_s=3600.0, **asked) as engine:
        if "reject" in habit:
            prefill.habits.reject = habit["reject"]
        else:
            prefill.die()
        async with asyncio.timeout(60):
            with pytest.raises((EngineGone, Refused)):
                await answer_of(engine, a_work())
        await _until(lambda: decode.running == 0)


async def test_a_partners_leg_is_aborted_by_name_with_its_answer(fleet: Fleet) -> None:
    prefill, decode = fleet.begin("prefill"), fleet.begin("decode", reject=400)
    asked = {"prefill_url": prefill.url, "bootstrap_port": fleet.bootstrap.port}
    async with adapter(decode, **asked) as engine:
        answer = asyncio.create_task(answer_of(engine, a_work()))
        with pytest.raises(Permanent, match="400"):
            await answer
        assert prefill.aborted == {"r1.1."}
        await _until(lambda: prefill.running == 0)


async def test_a_room_nobody_can_enter_is_not_asked_for(fleet: Fleet) -> None:
    """What goes to the fake host is never computed."""
    async with pair(fleet) as (_, other):
        assert other.spec.hand_off is not None
        opaque = to_opaque(Room(host="2.2.2.2", port=8998, room=7))
        offer = EngineHandOff(terms=other.spec.hand_off, opaque=opaque)
        with pytest.raises(Permanent, match="bootstrap_host"):
            await answer_of(other, a_work(Phase.DECODE, hand_off=offer))


async def test_servers_of_other_models_have_other_terms(fleet: Fleet) -> None:
    servers = [fleet.begin("decode", model_path=path) for path in ("/models/toy", "/models/other")]
    async with adapter(servers[0]) as one, adapter(servers[1]) as other:
        assert one.spec.hand_off != other.spec.hand_off


async def test_a_schema_cannot_begin_in_the_middle(fleet: Fleet) -> None:
    schema = msgspec.structs.replace(GREEDY, grammar=Grammar(kind="json_schema", text="{}"))
    async with adapter(fleet.begin()) as engine:
        with pytest.raises(Refused, match="has begun"):
            await answer_of(engine, a_work(sampling=schema, answer_ids=(5,)))


async def test_an_answer_is_a_sign_of_life_and_asked_for_by_the_key(fleet: Fleet) -> None:
    server = fleet.begin()
    async with adapter(server, probe_s=3600.0, api_key="sk-1") as engine:
        await answer_of(engine, a_work())
        await engine.health()
    assert "health_generate" not in [name for name, _ in server.asked]
    assert server.keys == {"Bearer sk-1"}


async def test_a_prefill_that_breaks_off_is_no_success(fleet: Fleet) -> None:
    prefill, decode = fleet.begin("prefill", cut_after=0), fleet.begin("decode")
    async with adapter(prefill) as one, adapter(decode) as other:
        leg = Prefill(one)
        answer = await answer_of(other, a_work(Phase.DECODE, hand_off=await leg.offer()))
        assert answer == toy_answer(PROMPT, 8)
        with pytest.raises(EngineGone, match="without a reason"):
            await leg.task


async def test_a_leg_that_waits_for_its_peer_is_told(fleet: Fleet) -> None:
    async with pair(fleet) as (one, _):
        leg = Prefill(one)
        await _until(lambda: fleet.bootstrap.holding() == 1)
        assert (await one.stats()).pinned_orphans == 1
        leg.task.cancel()
        await asyncio.gather(leg.task, return_exceptions=True)


async def test_servers_without_metrics_are_served(fleet: Fleet) -> None:
    async with adapter(fleet.begin(metrics=False)) as engine:
        assert (await engine.stats()).running is None


async def test_what_cannot_serve_says_so_at_the_start(fleet: Fleet) -> None:
    """Until 0.5.10 it drops `extra_key`, which keeps tenants apart in its cache."""
    with pytest.raises(Permanent, match=r"0\.5\.10 is too old: expected 0\.5\.11 or later"):
        async with adapter(fleet.begin(version="0.5.10")):
            pass
    for host in ("2.2.2.2", "0.0.0.0"):
        with pytest.raises(Permanent, match="bootstrap_host"):
            async with adapter(fleet.begin("prefill"), bootstrap_host=host):
                pass
    with pytest.raises(Permanent, match="bootstrap_prt"):
        make(adapter_settings("sglang", "http://x", options={"bootstrap_prt": 3}))


async def _started(server: FakeSglang) -> SglangEngine:
    engine = SglangEngine(settings_of(server), SglangOptions(start_s=60.0))
    await engine.start()
    return engine


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)
