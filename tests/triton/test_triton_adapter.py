"""What the behavioural suite does not ask: both flavours, bad set-ups, deadlines, a hung server."""

import asyncio
import signal
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from diptych_contracts.errors import EngineGone, Permanent, Refused, Unverified
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.adapters import AdapterSettings, make_engine
from diptych_engine.port import Phase, SequenceKey, SequenceWork
from diptych_engine.request_port import RequestEngine, TokenDelta
from diptych_engine.sim_card import sim_card
from diptych_testkit.triton_models.repository import Model
from diptych_testkit.triton_server import Installation, TritonServer
from diptych_text.codec import TextCodec

pytestmark = pytest.mark.triton

CARD = sim_card(model="sim")
CODEC = TextCodec.from_card(CARD)
PROMPT = CODEC.encode("What is the night like where the lighthouse stands?", add_bos=False)


def adapter(server: TritonServer, model: str, **options: Any) -> RequestEngine:
    return make_engine(
        AdapterSettings(
            name="triton",
            card=CARD,
            role=Role.PREFILL,
            url=server.url,
            engine_model=model,
            options={"ready_s": 0.0, **options},
            kv_tokens=1 << 16,
            max_sequences=16,
        )
    )


async def started(server: TritonServer, model: str, **options: Any) -> RequestEngine:
    engine = adapter(server, model, **options)
    await engine.start()
    return engine


def work(n_tokens: int = 16, answer: Sequence[int] = (), **more: Any) -> SequenceWork:
    values: dict[str, Any] = {
        "key": SequenceKey(RequestId("r"), 1),
        "phase": Phase.GENERATE,
        "prompt_ids": PROMPT,
        "answer_ids": answer,
        "sampling": Sampling(temperature=0.0),
        "stopping": Stopping(max_tokens=n_tokens),
    }
    return SequenceWork(**(values | more))


async def all_of(engine: RequestEngine, job: SequenceWork) -> tuple[list[int], EndReason | None]:
    deltas = [delta async for delta in engine.generate(job)]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].finish


async def offered(engine: RequestEngine, job: SequenceWork) -> tuple[TokenDelta, EngineHandOff]:
    offers: list[EngineHandOff] = []
    first = await engine.prefill(job, offers.append)
    return first, offers[0]


async def test_the_text_model_gives_the_text_of_the_token_model(server: TritonServer) -> None:
    tokens, texts = await started(server, "generation"), await started(server, "text")
    whole, finish = await all_of(tokens, work(40))
    again, also = await all_of(texts, work(40))
    assert CODEC.written(again) == CODEC.written(whole)
    assert finish is also is EndReason.LENGTH
    assert texts.spec.hand_off is None
    assert {"repetition_penalty", "ignore_eos"} <= set(texts.spec.unsupported)
    known = whole[:7]
    rest, _ = await all_of(texts, work(40, answer=known))
    assert CODEC.written([*known, *rest]) == CODEC.written(whole)
    with pytest.raises(Permanent, match="hands nothing over"):
        await texts.prefill(work(), lambda _: None)
    for engine in (tokens, texts):
        await engine.close()


@pytest.mark.parametrize("model", ["generation", "text"])
async def test_an_abort_hears_that_the_engine_has_let_go(server: TritonServer, model: str) -> None:
    engine = await started(server, model)
    async with asyncio.timeout(60):
        async with aclosing(engine.generate(work(4000))) as deltas:
            async for _ in deltas:
                break
        task = asyncio.create_task(all_of(engine, work(4000)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len((await all_of(engine, work(4)))[0]) > 0
    await engine.close()


async def test_a_hand_off_of_other_tokens_is_refused(server: TritonServer) -> None:
    context, generation = await started(server, "context"), await started(server, "generation")
    first, hand_off = await offered(context, work())
    wrong = ((first.token_ids[0] + 1) % CARD.vocab_size,)
    with pytest.raises(Refused, match="the generation began with token"):
        await all_of(generation, work(answer=wrong, hand_off=hand_off))
    with pytest.raises(Refused, match="no KV of context"):  # it was fetched already
        await all_of(generation, work(answer=first.token_ids, hand_off=hand_off))
    broken = EngineHandOff(terms=hand_off.terms, opaque=b"no msgpack")
    with pytest.raises(Unverified):
        await all_of(generation, work(answer=first.token_ids, hand_off=broken))
    for engine in (context, generation):
        await engine.close()


async def test_a_deadline_ends_an_answer(server: TritonServer) -> None:
    engine = await started(server, "generation", answer_s=0.5)
    with pytest.raises(EngineGone, match="DEADLINE_EXCEEDED"):
        await all_of(engine, work(4000))
    await engine.close()


async def test_a_model_that_is_not_there_is_awaited_and_told(server: TritonServer) -> None:
    engine = adapter(server, "nobody")
    with pytest.raises(EngineGone, match="model 'nobody' is not ready"):
        await engine.start()
    await engine.close()


async def test_kv_is_not_shared_between_tenants_unknowingly(server: TritonServer) -> None:
    engine = adapter(server, "reusing")
    with pytest.raises(Permanent, match="enable_kv_cache_reuse to false, or the option tenants_"):
        await engine.start()
    await engine.close()
    await (await started(server, "reusing", tenants_share_kv=True)).close()


async def test_only_a_server_in_explicit_mode_loads_models(server: TritonServer) -> None:
    engine = adapter(server, "generation", manage_model=True)
    with pytest.raises(Permanent, match="manage_model wants a server with"):
        await engine.start()
    await engine.close()


async def test_an_option_that_does_not_exist_is_named(server: TritonServer) -> None:
    with pytest.raises(Permanent, match="unknown field `redy_s`"):
        adapter(server, "generation", redy_s=1.0)


async def test_a_loaded_model_is_unloaded_and_a_hung_server_is_found(
    installation: Installation, tmp_path: Path
) -> None:
    server = TritonServer(tmp_path, installation, transceiver=tmp_path / "kv", explicit=True)
    try:
        server.start([Model(name="generation")])
        await asyncio.to_thread(server.wait_ready)
        options = {"manage_model": True, "ready_s": 90.0, "call_s": 10.0, "probe_s": 10.0}
        engine = await started(server, "generation", **options)
        await engine.health()
        server.signal(signal.SIGSTOP)
        with pytest.raises(EngineGone):
            await engine.health()
        server.signal(signal.SIGCONT)
        await asyncio.wait_for(until_well(engine), 60)
        await engine.close()
        gone = adapter(server, "generation")
        with pytest.raises(EngineGone, match="is not ready"):
            await gone.start()
        await gone.close()
    finally:
        await asyncio.to_thread(server.stop)


async def until_well(engine: RequestEngine) -> None:
    while True:
        try:
            await engine.health()
        except EngineGone:
            await asyncio.sleep(0.2)
        else:
            return
