"""TensorRT-LLM over HTTP, on a strict server whose engine is the strict fake."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from diptych_contracts.errors import EngineGone, Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Grammar, Sampling
from diptych_engine.port import Phase
from diptych_engine.request_port import KvStored, TokenDelta
from diptych_engine.tensorrt_llm.options import ServeOptions
from diptych_engine.tensorrt_llm.serve import TrtLlmServe, _parts
from diptych_engine.tensorrt_llm.serve_wire import failure_of
from diptych_testkit import fake_tensorrt_llm as fake
from diptych_testkit.fake_trtllm_serve import FakeServe
from diptych_testkit.request_engines import served, work
from diptych_testkit.toy_engine import toy_answer

PROMPT = list(range(1, 14))


class Pair:
    def __init__(self, prefill: TrtLlmServe, decode: TrtLlmServe, servers: list[FakeServe]) -> None:
        self.prefill, self.decode, self.servers = prefill, decode, servers
        self.world = servers[0].installed.world

    async def first(self, **asked: Any) -> tuple[TokenDelta, list[EngineHandOff]]:
        offers: list[EngineHandOff] = []
        asked_work = work(PROMPT, phase=Phase.PREFILL, **asked)
        return await self.prefill.prefill(asked_work, offers.append), offers

    async def rest(self, first: TokenDelta, offer: EngineHandOff, **asked: Any) -> list[TokenDelta]:
        asked_work = work(
            PROMPT, phase=Phase.DECODE, answer_ids=first.token_ids, hand_off=offer, **asked
        )
        return await told(self.decode, asked_work)


@contextlib.asynccontextmanager
async def pair_of(
    version: str = "1.3.0",
    *,
    repeats_first: bool = True,
    eos_at: int | None = None,
    **options: Any,
) -> AsyncIterator[Pair]:
    world = fake.World()
    servers = [
        FakeServe(
            fake.at(version, world=world, faults=fake.Faults(), eos_at=eos_at),
            repeats_first=repeats_first,
        )
        for _ in range(2)
    ]
    async with servers[0].running(), servers[1].running():
        engines = [engine_at(server, **options) for server in servers]
        for engine in engines:
            await engine.start()
        yield Pair(*engines, servers)
        for engine in engines:
            await engine.close()
    assert world.misuse == []


def engine_at(server: FakeServe, **options: Any) -> TrtLlmServe:
    settings = ServeOptions(tokens_per_block=4, poll_s=0.01, **options)
    return TrtLlmServe(served(checkpoint=""), settings, url=server.url)


async def told(engine: TrtLlmServe, asked: Any) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(asked)]


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_no_proxy_of_the_environment_sees_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with pair_of() as pair:
        assert ids(await told(pair.decode, work(PROMPT))) == toy_answer(PROMPT, 8)


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
@pytest.mark.parametrize("repeats_first", [True, False])
async def test_a_handed_over_answer_is_that_of_one_engine(
    version: str, repeats_first: bool
) -> None:
    async with pair_of(version, repeats_first=repeats_first) as pair:
        first, offers = await pair.first()
        rest = await pair.rest(first, offers[0])
        assert [*first.token_ids, *ids(rest)] == toy_answer(PROMPT, 8)
        assert rest[-1].finish is EndReason.LENGTH
        assert ids(await told(pair.decode, work(PROMPT))) == toy_answer(PROMPT, 8)
        legs = [body["disaggregated_params"] for body in pair.servers[1].bodies[:1]]
        assert legs[0]["request_type"] == "generation_only"
        assert ("disagg_request_id" in legs[0]) is (version == "1.3.0")


async def test_the_end_token_is_no_part_of_the_answer() -> None:
    async with pair_of(eos_at=len(PROMPT) + 3) as pair:
        first, offers = await pair.first()
        rest = await pair.rest(first, offers[0])
        assert [*first.token_ids, *ids(rest)] == toy_answer(PROMPT, 3)
        assert rest[-1].finish is EndReason.STOP


async def test_an_answer_that_prefill_ends_is_not_handed_over() -> None:
    async with pair_of(eos_at=len(PROMPT)) as pair:
        first, offers = await pair.first()
        assert (first.token_ids, first.finish, offers) == ((), EndReason.STOP, [])


async def test_decode_is_broken_off_after_its_first_part() -> None:
    async with pair_of() as pair:
        first, offers = await pair.first()
        pair.servers[1].installed.faults.transfer_s = 0.1
        pair.servers[1].installed.faults.step_s = 0.1  # to its end it would take longer than _idle
        task = asyncio.create_task(pair.rest(first, offers[0], max_tokens=4000))
        async with asyncio.timeout(60):
            while not pair.servers[1].llm.active:
                await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _idle(pair.servers[1])
        assert pair.world.leaks == []
        assert pair.world.fetched == 1


async def test_closing_a_stream_aborts_it() -> None:
    async with pair_of() as pair:
        pair.servers[1].installed.faults.step_s = 0.1
        stream = pair.decode.generate(work(PROMPT, max_tokens=4000))
        await anext(stream)
        await stream.aclose()
        await _idle(pair.servers[1])


async def _idle(server: FakeServe) -> None:
    async with asyncio.timeout(60):
        while server.llm.active:
            await asyncio.sleep(0.01)


async def test_a_request_that_fails_after_200_is_no_dead_engine() -> None:
    async with pair_of() as pair:
        first, offers = await pair.first()
        pair.servers[1].installed.faults.transfer_fails = True
        with pytest.raises(Refused, match="broke an answer off"):
            await pair.rest(first, offers[0])


async def test_a_dead_engine_behind_a_server_that_lives() -> None:
    async with pair_of() as pair:
        pair.servers[1].installed.faults.step_s = 0.01
        stream = pair.decode.generate(work(PROMPT, max_tokens=4000))
        await anext(stream)
        pair.servers[1].installed.faults.dead = True
        with pytest.raises(EngineGone, match="answers 503"):
            async for _ in stream:
                pass
        with pytest.raises(EngineGone):
            await pair.decode.health()


async def test_a_dead_engine_is_no_fault_of_who_comes_next() -> None:
    """The server says 400 of it, as of whatever an engine has against a request."""
    async with pair_of() as pair:
        for server in pair.servers:
            server.installed.faults.dead = True
        with pytest.raises(EngineGone, match="answers 503"):
            await told(pair.decode, work(PROMPT))
        with pytest.raises(EngineGone, match="answers 503"):
            await pair.first()


async def test_an_error_in_place_of_a_part_is_one() -> None:
    said = b'data: {"object":"error","message":"it broke"}\n\ndata: [DONE]\n\n'
    with pytest.raises(Refused, match="it broke"):
        _ = [part async for part in _parts(httpx.Response(200, content=said))]


def test_a_server_without_its_engine_is_gone() -> None:
    assert isinstance(failure_of(503, b"no engine"), EngineGone)


async def test_no_hand_off_is_no_answer() -> None:
    async with pair_of() as pair:
        pair.servers[0].installed.faults.no_hand_off = True
        with pytest.raises(Refused, match="gave no hand-off"):
            await pair.first()


async def test_a_server_that_is_gone() -> None:
    async with pair_of() as pair:
        pair.decode._client.base_url = "http://127.0.0.1:9"  # type: ignore[union-attr]
        with pytest.raises(EngineGone, match="ConnectError"):
            await told(pair.decode, work(PROMPT))


async def test_a_server_that_never_comes_is_told() -> None:
    engine = TrtLlmServe(served(), ServeOptions(start_s=0.05), url="http://127.0.0.1:9")
    with pytest.raises(EngineGone, match="does not answer in"):
        await engine.start()
    await engine.close()


async def test_a_server_of_another_version_is_refused_by_name() -> None:
    server = FakeServe(fake.at("1.3.0"))
    server.installed.version = "1.4.0rc4"
    async with server.running():
        engine = engine_at(server)
        with pytest.raises(Permanent, match=r"runs TensorRT-LLM 1.4.0rc4, expected >=1.2,<1.4"):
            await engine.start()
        await engine.close()


async def test_logprobs_are_not_told_by_token() -> None:
    async with pair_of() as pair:
        with pytest.raises(Permanent, match="logprobs"):
            await told(pair.decode, work(PROMPT, sampling=Sampling(top_logprobs=1)))
        assert "logprobs" in pair.decode.spec.unsupported


async def test_a_schema_is_for_a_whole_answer_and_a_guided_server() -> None:
    guided = Sampling(temperature=0.0, grammar=Grammar(kind="json_schema", text="{}"))
    async with pair_of(guided=True) as pair:
        await told(pair.decode, work(PROMPT, sampling=guided))
        with pytest.raises(Permanent, match="middle of an answer"):
            await told(pair.decode, work(PROMPT, sampling=guided, answer_ids=(4,)))
    async with pair_of() as pair:
        with pytest.raises(Permanent, match="none of that kind"):
            await told(pair.decode, work(PROMPT, sampling=guided))


async def test_cached_kv_is_told_once() -> None:
    async with pair_of(block_reuse=True) as pair:
        for cached in (0, 12):
            deltas = await told(pair.decode, work(PROMPT))
            assert [d.cached_tokens for d in deltas] == [cached, *[None] * (len(deltas) - 1)]


async def test_kept_kv_is_for_one_tenant() -> None:
    async with pair_of(block_reuse=True) as pair:
        await told(pair.decode, work(PROMPT, tenant="acme"))
        with pytest.raises(Permanent, match="for one tenant only"):
            await told(pair.decode, work(PROMPT, tenant="globex"))


async def test_events_and_statistics() -> None:
    async with pair_of(block_reuse=True, events=True) as pair:
        await told(pair.decode, work(PROMPT))
        events = pair.decode.kv_events()
        stored = await anext(events)
        assert isinstance(stored, KvStored)
        assert stored.token_ids == tuple(PROMPT[:12])
        await events.aclose()  # type: ignore[attr-defined]
        assert (await pair.decode.stats()).kv_tokens_used == 20


async def test_events_are_left_to_who_may_read_them() -> None:
    async with pair_of(block_reuse=True) as pair:
        await told(pair.decode, work(PROMPT))
        assert await anext(pair.decode.kv_events(), None) is None  # type: ignore[call-overload]


async def test_a_body_that_the_schema_refuses_is_the_requests_fault() -> None:
    async with pair_of() as pair:
        body = pair.decode._body(work(PROMPT), None, stream=False) | {"best_before": 1}
        with pytest.raises(Permanent, match="best_before"):
            await pair.decode._whole(body)
        with pytest.raises(Refused, match="does not fit"):
            await told(pair.decode, work([5000]))


async def test_sixty_four_at_once() -> None:
    async with pair_of(connect_s=600.0, stall_s=600.0) as pair:

        async def one(n: int) -> None:
            prompt = [n + 1, *PROMPT]
            offers: list[EngineHandOff] = []
            first = await pair.prefill.prefill(work(prompt, phase=Phase.PREFILL), offers.append)
            asked = work(prompt, phase=Phase.DECODE, answer_ids=first.token_ids, hand_off=offers[0])
            rest = await told(pair.decode, asked)
            assert [*first.token_ids, *ids(rest)] == toy_answer(prompt, 8)

        async with asyncio.TaskGroup() as tasks:
            for n in range(64):
                tasks.create_task(one(n))
