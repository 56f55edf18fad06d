"""The vLLM adapter against a server that takes nothing but the contract."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from diptych_contracts.errors import EngineGone, Permanent, Refused
from diptych_contracts.handoffs import FirstToken
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Grammar, Sampling, Stopping
from diptych_engine.over_http import client
from diptych_engine.over_http.resuming import seed_after
from diptych_engine.port import Phase
from diptych_engine.vllm.engine import VllmEngine, make
from diptych_engine.vllm.options import VllmOptions
from diptych_testkit.fake_engines.vllm import FakeNixl, FakeVllm, VllmHabits
from diptych_testkit.fake_engines.works import (
    a_work,
    adapter_settings,
    answer_of,
    deltas_of,
    handed_over,
)
from diptych_testkit.toy_engine import GREEDY, toy_answer

PROMPT = tuple(range(1, 50))
Start = Callable[..., FakeVllm]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[FakeVllm] = []
    nixl = FakeNixl()

    def begin(**habits: object) -> FakeVllm:
        server = FakeVllm(nixl, VllmHabits(**habits))  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server

    yield begin
    faults = [fault for server in servers for fault in server.faults]
    for server in servers:
        server.stop()
    assert faults == []


@asynccontextmanager
async def adapter(
    server: FakeVllm, model: str = "", **options: object
) -> AsyncIterator[VllmEngine]:
    values = {"start_s": 5.0} | options
    settings = adapter_settings("vllm", server.url, engine_model=model)
    engine = VllmEngine(settings, VllmOptions(**values))  # type: ignore[arg-type]
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("token_level", [False, True])
async def test_an_answer_is_the_models(start: Start, *, token_level: bool) -> None:
    server = start(token_level=token_level, tokens_per_event=3)
    async with adapter(server) as engine:
        deltas = await deltas_of(engine, a_work(max_tokens=8))
    assert [token for d in deltas for token in d.token_ids] == toy_answer(PROMPT, 8)
    assert deltas[-1].finish is EndReason.LENGTH
    doors = {name for name, body in server.asked if body}
    assert doors == ({"generate"} if token_level else {"completions"})


@pytest.mark.parametrize(
    ("version", "door"),
    [("0.11.0", "completions"), ("0.29.0", "completions"), ("0.30.0", "generate")],
)
async def test_the_token_level_door_is_used_where_it_does_all_of_it(
    start: Start, version: str, door: str
) -> None:
    """It is there from 0.11.1 on; until 0.28 it drops what KV is handed over by."""
    server = start(version=version, token_level=True)
    async with adapter(server) as engine:
        await deltas_of(engine, a_work(max_tokens=2))
    assert {name for name, body in server.asked if body} == {door}


@pytest.mark.parametrize("token_level", [False, True])
async def test_kv_is_handed_over_unchanged(start: Start, *, token_level: bool) -> None:
    """The fake compares names, order and values of the params, X-Request-Id and the prompt."""
    prefill, decode = start(token_level=token_level), start(token_level=token_level)
    async with adapter(prefill) as one, adapter(decode) as other:
        assert one.spec.hand_off == other.spec.hand_off
        offer = await handed_over(one, a_work(Phase.PREFILL))
        answer = await answer_of(other, a_work(Phase.DECODE, hand_off=offer))
        await other.stats()
        assert answer == toy_answer(PROMPT, 8)
        assert prefill.nixl.pinned() == 0
        assert (other.counts.handed, other.counts.recomputed) == (1, 0)


async def test_what_it_is_comes_from_the_server(start: Start) -> None:
    async with adapter(start()) as engine:
        spec = engine.spec
        assert spec.engine == "vllm 0.32.0"
        assert (spec.kv_tokens, spec.layout.block_tokens) == (16 * 1024, 16)
        assert spec.hand_off is not None
        assert spec.hand_off.engine_version == "0.32.0 /models/toy"
        assert spec.hand_off.first_token is FirstToken.DECODE
        assert spec.hand_off.orphan_ms == 24_000
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 4096)


async def test_servers_of_other_models_have_other_terms(start: Start) -> None:
    async with adapter(start()) as one, adapter(start(root="/models/other")) as other:
        assert one.spec.hand_off != other.spec.hand_off


async def test_the_end_of_text_is_no_token_of_the_answer(start: Start) -> None:
    async with adapter(start(eos_at=52)) as engine:
        deltas = await deltas_of(engine, a_work())
        assert [token for d in deltas for token in d.token_ids] == toy_answer(PROMPT, 3)
        assert deltas[-1].finish is EndReason.STOP
        ignoring = a_work(stopping=Stopping(max_tokens=8, ignore_eos=True))
        assert len(await answer_of(engine, ignoring)) == 8


async def test_an_answer_goes_on_where_it_was(start: Start) -> None:
    whole = toy_answer(PROMPT, 8)
    async with adapter(start()) as engine:
        assert await answer_of(engine, a_work(answer_ids=whole[:5])) == whole[5:]


async def test_a_seed_chooses_and_a_rest_has_its_own(start: Start) -> None:
    warm = Sampling(temperature=1.0, seed=2**64 - 1)
    async with adapter(start()) as engine:
        first = await answer_of(engine, a_work(sampling=warm))
        assert await answer_of(engine, a_work(sampling=warm)) == first
        other = Sampling(temperature=1.0, seed=5)
        assert await answer_of(engine, a_work(sampling=other)) != first
    assert seed_after(warm, 0) == warm.seed
    assert seed_after(warm, 1) != seed_after(warm, 2)


@pytest.mark.parametrize("token_level", [False, True])
async def test_logprobs_are_told_by_token(start: Start, *, token_level: bool) -> None:
    work = a_work(max_tokens=2, sampling=msgspec.structs.replace(GREEDY, top_logprobs=2))
    async with adapter(start(token_level=token_level)) as engine:
        deltas = await deltas_of(engine, work)
    token = deltas[0].token_ids[0]
    (chances,) = deltas[0].logprobs
    chosen = (token, -0.125 * (token % 8))
    assert chances == (chosen, chosen, (token + 1, chosen[1] - 1))


async def test_every_parameter_is_part_of_the_contract(start: Start) -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias=((7, 1.5),),
        grammar=Grammar(kind="json_schema", text='{"type":"object"}'),
    )
    for token_level in (False, True):
        server = start(token_level=token_level)
        async with adapter(server) as engine:
            await answer_of(engine, a_work(sampling=sampling, tenant="acme"))
            body = server.asked[-1][1]
            asked = body["sampling_params"] if token_level else body
            assert asked["structured_outputs"] == {"json": '{"type":"object"}'}
            assert asked["logit_bias"] == {"7": 1.5}
            assert len(body["cache_salt"]) == 36
            assert "acme" not in body["cache_salt"]


async def test_a_grammar_it_cannot_obey_is_no_silent_one(start: Start) -> None:
    lark = msgspec.structs.replace(GREEDY, grammar=Grammar(kind="lark", text="start: /a/"))
    schema = msgspec.structs.replace(GREEDY, grammar=Grammar(kind="json_schema", text="{}"))
    server = start()
    async with adapter(server) as engine:
        with pytest.raises(Permanent, match="Lark"):
            await answer_of(engine, a_work(sampling=lark))
        with pytest.raises(Refused, match="has begun"):
            await answer_of(engine, a_work(sampling=schema, answer_ids=(5,)))
    async with adapter(server, lark=True) as engine:
        await answer_of(engine, a_work(sampling=lark))
    assert server.asked[-1][1]["structured_outputs"] == {"grammar": "start: /a/"}


async def test_an_error_event_before_done_is_an_error(start: Start) -> None:
    """What vLLM 0.32 sent when its worker died: 200, tokens, an error event, `[DONE]`."""
    async with adapter(start(error_after=2)) as engine:
        with pytest.raises(EngineGone, match="EngineCore"):
            await answer_of(engine, a_work())


async def test_done_alone_is_no_success(start: Start) -> None:
    async with adapter(start(cut_after=2)) as engine:
        with pytest.raises(EngineGone, match="without a reason"):
            await answer_of(engine, a_work())


async def test_a_server_that_dies_is_gone(start: Start) -> None:
    async with adapter(start(die_after=2)) as engine:
        with pytest.raises(EngineGone):
            await answer_of(engine, a_work())
        with pytest.raises(EngineGone):
            await engine.health()
        with pytest.raises(EngineGone):
            await handed_over(engine, a_work(Phase.PREFILL))


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, Permanent), (404, Refused), (429, Refused), (503, Refused), (401, EngineGone)],
)
async def test_a_no_before_the_engine(start: Start, status: int, error: type[Exception]) -> None:
    server = start()
    async with adapter(server) as engine:
        server.habits.reject = status
        with pytest.raises(error, match=str(status)):
            await answer_of(engine, a_work())
        with pytest.raises(error, match=str(status)):
            await handed_over(engine, a_work(Phase.PREFILL))


CACHED = "remote_prefill_cached_tokens"


@pytest.mark.parametrize("details", [True, False])
@pytest.mark.parametrize("older", [(), (CACHED,)])
async def test_what_was_silently_recomputed_is_counted(
    start: Start, older: tuple[str, ...], *, details: bool
) -> None:
    """Params that lack a field: vLLM logs it, and the answer is right."""
    prefill, decode = start(forgets=("remote_port", *older)), start(details=details)
    async with adapter(prefill) as one, adapter(decode) as other:
        for n in range(3):
            offer = await handed_over(one, a_work(Phase.PREFILL, request_id=f"r{n}"))
            work = a_work(Phase.DECODE, request_id=f"r{n}", hand_off=offer)
            assert await answer_of(other, work) == toy_answer(PROMPT, 8)
        await other.stats()
        assert (await other.stats()).recomputed == 3
        assert (other.counts.handed, other.counts.recomputed) == (3, 3)


async def test_a_lease_that_is_over_is_seen_on_both_sides(start: Start) -> None:
    prefill, decode = start(lease_s=0.01), start(details=False)
    async with adapter(prefill, lease_s=0.01) as one, adapter(decode) as other:
        offer = await handed_over(one, a_work(Phase.PREFILL))
        await asyncio.sleep(0.05)
        await one.stats()
        work = a_work(Phase.DECODE, hand_off=offer)
        assert await answer_of(other, work) == toy_answer(PROMPT, 8)
        await other.stats()
        await other.stats()
        assert one.counts.expired == 1
        assert other.counts.recomputed == 1


@pytest.mark.parametrize("details", [True, False])
@pytest.mark.parametrize("older", [(), (CACHED,)])
async def test_fetched_kv_is_not_taken_for_recomputed(
    start: Start, older: tuple[str, ...], *, details: bool
) -> None:
    """vLLM 0.32 tells of what prefill had cached at decode: nothing, mostly."""
    prefill, decode = start(forgets=older), start(details=details)
    async with adapter(prefill) as one, adapter(decode) as other:
        for n in range(5):
            offer = await handed_over(one, a_work(Phase.PREFILL, request_id=f"r{n}"))
            await answer_of(other, a_work(Phase.DECODE, request_id=f"r{n}", hand_off=offer))
            await other.stats()
        await other.stats()
        assert (other.counts.handed, other.counts.recomputed) == (5, 0)


async def test_null_params_are_nothing_to_pull(start: Start) -> None:
    prefill, decode = start(null_params=True), start()
    async with adapter(prefill) as one, adapter(decode) as other:
        offer = await handed_over(one, a_work(Phase.PREFILL))
        assert offer.opaque == b"null"
        answer = await answer_of(other, a_work(Phase.DECODE, hand_off=offer))
        assert answer == toy_answer(PROMPT, 8)
        assert one.counts.nothing_to_pull == 1
    assert "kv_transfer_params" not in decode.asked[-1][1]


async def test_an_answer_is_a_sign_of_life_and_asked_for_by_the_key(start: Start) -> None:
    server = start()
    async with adapter(server, probe_s=3600.0, api_key="sk-1") as engine:
        await answer_of(engine, a_work())
        await engine.health()
    assert [name for name, body in server.asked if body] == ["completions"]
    assert server.keys == {"Bearer sk-1"}


async def test_attempts_at_one_request_are_apart(start: Start) -> None:
    """By a name they share, decode would fetch the KV of another attempt."""
    server = start()
    async with adapter(server) as engine:
        work = a_work(Phase.PREFILL)
        for attempt in (1, 2):
            await handed_over(engine, replace(work, key=work.key._replace(attempt=attempt)))
        assert server.nixl.pinned() == 2


async def test_closing_aborts(start: Start) -> None:
    server = start(step_s=0.02)
    async with adapter(server) as engine:
        async with aclosing(engine.generate(a_work(max_tokens=500))) as stream:
            await anext(stream)
        await _until(lambda: server.running == 0)
        assert server.aborted == 1


async def test_a_cancelled_prefill_keeps_nothing(start: Start) -> None:
    server = start(step_s=5.0)
    async with adapter(server) as engine:
        task = asyncio.create_task(handed_over(engine, a_work(Phase.PREFILL)))
        await _until(lambda: server.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: server.running == 0)
        assert server.nixl.pinned() == 0


async def test_sixty_four_answers_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 600.0)  # a server of this very process, on a busy day
    prompts = [tuple(range(n + 1, n + 20)) for n in range(64)]
    async with adapter(start(step_s=0.001), silence_s=600.0) as engine:
        works = [a_work(request_id=f"r{n}", prompt_ids=p) for n, p in enumerate(prompts)]
        answers = await asyncio.gather(*(answer_of(engine, work) for work in works))
    assert answers == [toy_answer(prompt, 8) for prompt in prompts]


async def test_health_asks_the_engine_itself(start: Start) -> None:
    server = start()
    async with adapter(server, probe_s=0.0) as engine:
        await engine.health()
        assert server.asked[-1][0] == "completions"
        server.habits.healthy = False
        with pytest.raises(EngineGone, match="503"):
            await engine.health()


async def test_a_busy_engine_that_gets_on_is_asked_for_no_proof(start: Start) -> None:
    server = start(step_s=0.01)
    async with adapter(server, probe_s=0.0) as engine:
        async with aclosing(engine.generate(a_work(max_tokens=500))) as stream:
            await anext(stream)
            await engine.health()
        assert sum(name == "completions" for name, _ in server.asked) == 1


async def test_a_silent_engine_is_gone(start: Start) -> None:
    async with adapter(start(hangs=True), silence_s=0.1) as engine:
        with pytest.raises(EngineGone):
            await answer_of(engine, a_work())


async def test_what_cannot_serve_says_so_at_the_start(start: Start) -> None:
    old, other = start(version="0.9.1"), start(model="other")
    with pytest.raises(Permanent, match=r"0\.9\.1 is too old"):
        async with adapter(old):
            pass
    with pytest.raises(Permanent, match="does not serve 'toy', but other"):
        async with adapter(other, "toy"):
            pass
    other.stop()
    with pytest.raises(EngineGone, match="not ready"):
        async with adapter(other, start_s=0.1):
            pass


def test_wrong_options_are_named() -> None:
    with pytest.raises(Permanent, match="leas_s"):
        make(adapter_settings("vllm", "http://x", options={"leas_s": 3}))
    with pytest.raises(Permanent, match="engine_url"):
        make(adapter_settings("vllm", ""))


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)
