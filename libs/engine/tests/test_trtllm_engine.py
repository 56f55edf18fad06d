"""The TensorRT-LLM adapter on a strict fake: hand-offs, cursors, aborts, events, failures."""

import asyncio
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import EngineGone, Incompatible, Permanent, Refused, Unverified
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Grammar, Sampling
from diptych_engine.port import Phase
from diptych_engine.request_port import KvCleared, KvRemoved, KvStored, TokenDelta
from diptych_engine.tensorrt_llm.engine import TrtLlmEngine
from diptych_engine.tensorrt_llm.handing_over import Envelope
from diptych_engine.tensorrt_llm.kv_events import KvEventReader
from diptych_engine.tensorrt_llm.request_ids import MAX_ID, MIN_ID, RequestIds
from diptych_testkit import fake_tensorrt_llm as fake
from diptych_testkit.request_engines import trtllm, work
from diptych_testkit.toy_engine import EOS_ID, toy_answer

PROMPT = list(range(1, 14))
VERSIONS = ["1.2.1", "1.3.0"]


class Pair:
    """A prefill engine and a decode engine of one version, on one network."""

    def __init__(
        self, version: str = "1.3.0", *, eos_at: int | None = None, **options: Any
    ) -> None:
        self.world = fake.World()
        self.faults = fake.Faults(), fake.Faults()
        installed = [
            fake.at(version, world=self.world, faults=faults, eos_at=eos_at)
            for faults in self.faults
        ]
        self.prefill = trtllm(installed[0].importer, Role.PREFILL, **options)
        self.decode = trtllm(installed[1].importer, Role.DECODE, **options)
        self.installed = installed

    async def __aenter__(self) -> "Pair":
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.prefill.close()
        await self.decode.close()
        assert self.world.misuse == []

    async def first(self, **asked: Any) -> tuple[TokenDelta, list[EngineHandOff]]:
        offers: list[EngineHandOff] = []
        delta = await self.prefill.prefill(
            work(PROMPT, phase=Phase.PREFILL, **asked), offers.append
        )
        return delta, offers

    async def rest(self, first: TokenDelta, offer: EngineHandOff, **asked: Any) -> list[TokenDelta]:
        answer = (*asked.pop("answer_ids", ()), *first.token_ids)
        asked_work = work(PROMPT, phase=Phase.DECODE, answer_ids=answer, hand_off=offer, **asked)
        return await told(self.decode, asked_work)


async def told(engine: TrtLlmEngine, asked: Any) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(asked)]


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_handed_over_answer_is_that_of_one_engine(version: str) -> None:
    async with Pair(version) as pair:
        first, offers = await pair.first()
        assert first.finish is None
        rest = await pair.rest(first, offers[0])
        assert [*first.token_ids, *ids(rest)] == toy_answer(PROMPT, 8)
        assert rest[-1].finish is EndReason.LENGTH
        assert pair.world.fetched == 1
        assert ids(await told(pair.decode, work(PROMPT))) == toy_answer(PROMPT, 8)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shown", [True, False])
async def test_the_end_token_is_no_part_of_the_answer(version: str, shown: bool) -> None:
    async with Pair(version, eos_at=len(PROMPT) + 3) as pair:
        for faults in pair.faults:
            faults.end_token_in_outputs = shown
        first, offers = await pair.first()
        rest = await pair.rest(first, offers[0])
        assert [*first.token_ids, *ids(rest)] == toy_answer(PROMPT, 3)
        assert EOS_ID not in ids(rest)
        assert rest[-1].finish is EndReason.STOP


async def test_an_answer_that_prefill_ends_is_not_handed_over() -> None:
    async with Pair(eos_at=len(PROMPT)) as pair:
        first, offers = await pair.first()
        assert (first.token_ids, first.finish, offers) == ((), EndReason.STOP, [])
        assert not pair.world.tickets


async def test_an_answer_of_one_token_pins_nothing() -> None:
    async with Pair() as pair:
        first, offers = await pair.first(max_tokens=1)
        assert list(first.token_ids) == toy_answer(PROMPT, 1)
        assert first.finish is EndReason.LENGTH
        assert not offers
        assert not pair.world.tickets


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_answer_goes_on_after_a_recovery(version: str) -> None:
    answer = toy_answer(PROMPT, 8)
    async with Pair(version) as pair:
        first, offers = await pair.first(answer_ids=answer[:3])
        assert list(first.token_ids) == answer[3:4]
        rest = await pair.rest(first, offers[0], answer_ids=answer[:3])
        assert ids(rest) == answer[4:]


async def test_sampling_is_asked_for_in_the_engines_words() -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=11, presence_penalty=0.5)
    async with Pair() as pair:
        deltas = await told(pair.decode, work(PROMPT, sampling=sampling))
    assert ids(deltas) == toy_answer(PROMPT, 8, sampling=sampling)


@pytest.mark.parametrize("version", VERSIONS)
async def test_logprobs_cross_the_hand_off(version: str) -> None:
    sampling = Sampling(temperature=0.0, top_logprobs=2)
    async with Pair(version) as pair:
        first, offers = await pair.first(sampling=sampling)
        rest = await pair.rest(first, offers[0], sampling=sampling)
        for delta in (first, *rest):
            assert len(delta.logprobs) == len(delta.token_ids)
            for token, chances in zip(delta.token_ids, delta.logprobs, strict=True):
                assert len(chances) == 3
                assert chances[0] == chances[1]
                assert chances[0][0] == token


async def test_cached_kv_is_a_tenants_own() -> None:
    async with Pair(tokens_per_block=4) as pair:
        cached = [
            (await told(pair.decode, work(PROMPT, tenant=tenant)))[0].cached_tokens
            for tenant in ("acme", "globex", "acme")
        ]
    assert cached == [0, 0, 12]


async def test_prefill_is_aborted_at_once() -> None:
    async with Pair() as pair:
        pair.faults[0].step_s = 0.5
        task = asyncio.create_task(pair.first())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pair.world.tickets
        assert (await pair.prefill.stats()).running == 0


async def test_decode_is_aborted_after_its_first_output() -> None:
    """Aborted while it fetches KV, the engine would leak the transfer on both sides."""
    async with Pair() as pair:
        first, offers = await pair.first()
        pair.faults[1].transfer_s = 0.5
        task = asyncio.create_task(pair.rest(first, offers[0]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.world.leaks == []
        assert pair.world.fetched == 1
        assert ids(await told(pair.decode, work(PROMPT))) == toy_answer(PROMPT, 8)


async def test_closing_a_stream_aborts_it() -> None:
    async with Pair() as pair:
        pair.faults[1].step_s = 0.1
        stream = pair.decode.generate(work(PROMPT, max_tokens=4000))
        await anext(stream)
        await stream.aclose()
        assert (await pair.decode.stats()).running is not None
        assert pair.installed[1].llms[0].active == 0


async def test_kv_that_nobody_fetches_is_freed_by_the_engine() -> None:
    async with Pair(kv_transfer_timeout_ms=500) as pair:
        terms = pair.prefill.spec.hand_off
        assert terms is not None
        assert terms.orphan_ms == 500
        await pair.first()
        assert len(pair.world.tickets) == 1
        async with asyncio.timeout(60):
            while not pair.world.expired:
                await asyncio.sleep(0.01)
        assert pair.world.expired == 1


async def test_a_hand_off_is_good_once() -> None:
    async with Pair() as pair:
        first, offers = await pair.first()
        await pair.rest(first, offers[0])
        with pytest.raises(Refused, match="gave a request up"):
            await pair.rest(first, offers[0])
        assert pair.world.misuse
        pair.world.misuse.clear()


async def test_a_transfer_that_fails_fails_one_request() -> None:
    async with Pair() as pair:
        first, offers = await pair.first()
        pair.faults[1].transfer_fails = True
        with pytest.raises(Refused, match="transfer timed out"):
            await pair.rest(first, offers[0])
        await pair.decode.health()


async def test_a_hand_off_of_another_prompt_is_not_decoded() -> None:
    async with Pair() as pair:
        first, offers = await pair.first()
        with pytest.raises(Unverified, match="of 13 tokens, not 15"):
            await pair.rest(first, offers[0], answer_ids=(5, 6))


async def test_another_version_is_refused_by_name() -> None:
    async with Pair("1.3.0") as new, Pair("1.2.1") as old:
        first, offers = await new.first()
        assert new.prefill.spec.hand_off != old.decode.spec.hand_off
        with pytest.raises(Incompatible, match=r"prefill runs TensorRT-LLM 1.3.0, decode 1.2.1"):
            await old.rest(first, offers[0])


async def test_a_field_that_decode_does_not_know_is_refused_by_name() -> None:
    async with Pair() as pair:
        first, offers = await pair.first()
        envelope = msgspec.msgpack.decode(offers[0].opaque, type=Envelope)
        envelope.fields["remote_tail_start"] = 7
        changed = msgspec.structs.replace(offers[0], opaque=msgspec.msgpack.encode(envelope))
        with pytest.raises(Incompatible, match="does not know here: remote_tail_start"):
            await pair.rest(first, changed)


async def test_a_hand_off_carries_every_field_and_its_version() -> None:
    async with Pair() as pair:
        _, offers = await pair.first(sampling=Sampling(temperature=0.0, top_logprobs=1))
    envelope = msgspec.msgpack.decode(offers[0].opaque, type=Envelope)
    assert envelope.engine_version == "1.3.0"
    assert set(envelope.fields) == {
        "request_type", "first_gen_tokens", "ctx_request_id", "opaque_state",
        "disagg_request_id", "first_gen_log_probs",
    }  # fmt: skip
    assert isinstance(envelope.fields["opaque_state"], bytes)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt": [5000]}, "does not fit"),
        ({"sampling": Sampling(logit_bias=((1, 2.0),))}, "logit_bias"),
        ({"sampling": Sampling(grammar=Grammar(kind="lark", text="x"))}, "grammar"),
        ({"sampling": Sampling(grammar=Grammar(kind="json_schema", text="{}"))}, "guided"),
    ],
)
async def test_what_it_cannot_obey_is_the_requests_fault(asked: dict[str, Any], says: str) -> None:
    async with Pair() as pair:
        with pytest.raises(Permanent, match=says):
            await told(pair.decode, work(asked.pop("prompt", PROMPT), **asked))
        await pair.decode.health()


async def test_a_schema_cannot_begin_in_the_middle() -> None:
    sampling = Sampling(grammar=Grammar(kind="json_schema", text="{}"))
    async with Pair(guided="xgrammar") as pair:
        assert await told(pair.decode, work(PROMPT, sampling=sampling))
        with pytest.raises(Permanent, match="after 2 tokens"):
            await told(pair.decode, work(PROMPT, sampling=sampling, answer_ids=(4, 5)))
        assert pair.decode.spec.unsupported == ("logit_bias", "tool_choice")
        (asked,) = pair.installed[1].llms[0].used
        assert asked.guided_decoding is not None
        assert asked.guided_decoding.json == "{}"


async def test_an_engine_that_dies_is_told_to_all() -> None:
    async with Pair() as pair:
        stream = pair.decode.generate(work(PROMPT, max_tokens=1000))
        await anext(stream)
        pair.faults[1].dead = True
        with pytest.raises(EngineGone, match="the executor died"):
            async for _ in stream:
                pass
        with pytest.raises(EngineGone):
            await pair.decode.health()
        with pytest.raises(EngineGone):
            await told(pair.decode, work(PROMPT))


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_hung_engine_is_found_by_its_probe(version: str) -> None:
    async with Pair(version, probe_s=0.05) as pair:
        pair.faults[1].hangs = True
        with pytest.raises(EngineGone, match="gives no token in"):
            await pair.decode.health()


async def test_a_hung_engine_stays_gone() -> None:
    """It holds what it was asked: only a new process is known to hold nothing."""
    async with Pair(probe_s=0.05) as pair:
        pair.faults[1].hangs = True
        with pytest.raises(EngineGone):
            await pair.decode.health()
        pair.faults[1].hangs = False
        for asked in (told(pair.decode, work(PROMPT)), pair.decode.health()):
            with pytest.raises(EngineGone, match="gives no token in"):
                await asked


async def test_an_engine_is_idle_again_however_its_requests_ended() -> None:
    """Only an idle one is asked for a token: one that seemed busy for ever would never be."""
    async with Pair(probe_s=0.05) as pair:
        first, offers = await pair.first()
        await pair.first(max_tokens=1)
        await pair.rest(first, offers[0])
        stream = pair.decode.generate(work(PROMPT, max_tokens=1000))
        await anext(stream)
        await stream.aclose()
        again, offers = await pair.first()
        pair.faults[1].transfer_fails = True
        with pytest.raises(Refused):
            await pair.rest(again, offers[0])
        for faults in pair.faults:
            faults.hangs = True
        for engine in (pair.prefill, pair.decode):
            with pytest.raises(EngineGone, match="gives no token in"):
                await engine.health()


async def test_no_hand_off_is_no_answer() -> None:
    async with Pair() as pair:
        pair.faults[0].no_hand_off = True
        with pytest.raises(Refused, match="gave no hand-off"):
            await pair.first()


async def test_a_wrong_setting_stops_the_start_with_one_line() -> None:
    installed = fake.at("1.3.0", faults=fake.Faults(refuses_to_start="no such\nfolder"))
    with pytest.raises(Permanent, match=r"^TensorRT-LLM does not start: no such$"):
        await trtllm(installed.importer).start()


async def test_the_engine_is_made_as_its_role_wants() -> None:
    async with Pair(tokens_per_block=16, tensor_parallel=2, pipeline_parallel=2) as pair:
        prefill, decode = (installed.llms[0].args for installed in pair.installed)
    assert (prefill.disable_overlap_scheduler, decode.disable_overlap_scheduler) == (True, False)
    for args in (prefill, decode):
        assert args.enable_chunked_prefill
        assert args.enable_iter_perf_stats
        assert args.kv_cache_config.event_buffer_max_size == 4096
        assert (args.tensor_parallel_size, args.pipeline_parallel_size) == (2, 2)
        assert args.cache_transceiver_config is not None
        assert args.cache_transceiver_config.backend == "NIXL"
        assert args.cache_transceiver_config.max_tokens_in_buffer == 4096
        assert args.cache_transceiver_config.kv_transfer_timeout_ms == 60_000


async def test_events_wait_for_the_first_answer_and_skip_partial_blocks() -> None:
    async with Pair(tokens_per_block=4) as pair:
        events = pair.decode.kv_events()
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await told(pair.decode, work(PROMPT))
        stored = await waiting
        assert isinstance(stored, KvStored)
        assert stored.token_ids == tuple(PROMPT[:12])
        assert len(stored.engine_hashes) == 3
        assert min(stored.engine_hashes) >= 1 << 63
        pair.installed[1].llms[0].cache.drop_all()
        removed = await anext(events)
        assert isinstance(removed, KvRemoved)
        assert removed.engine_hashes == stored.engine_hashes
        pair.faults[1].lost_events = 1
        await told(pair.decode, work([9, *PROMPT]))
        await told(pair.decode, work([8, *PROMPT]))
        assert await anext(events) == KvCleared()
        after = await anext(events)
        assert isinstance(after, KvStored)
        assert after.token_ids[0] == 8
        await events.aclose()  # type: ignore[attr-defined]


def test_events_with_nothing_in_them_tell_nothing() -> None:
    reader = KvEventReader(4)
    for event in ({}, {"data": None}, {"data": {"type": "updated"}}, {"data": {"type": "stored"}}):
        assert reader.read(event) == []


async def test_statistics_are_the_engines() -> None:
    async with Pair(tokens_per_block=4) as pair:
        assert (await pair.decode.stats()).running == 0
        await told(pair.decode, work(PROMPT))
        stats = await pair.decode.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens_used) == (1, 0, 20)


@pytest.mark.parametrize("process_ids", [False, True])
def test_ids_are_the_vendors_layout(process_ids: bool) -> None:
    ids_of = RequestIds(process_ids=process_ids, machine=5, clock_ms=lambda: 1_700_000_000_000)
    made = [ids_of.next() - MIN_ID for _ in range(1000)]
    assert len(set(made)) == 1000
    bits = 10 if process_ids else 12
    assert {number >> bits & (0x3FFF if process_ids else 0x3FF) for number in made} == {5}
    assert all(0 < number + MIN_ID <= MAX_ID for number in made)
    with pytest.raises(Permanent, match="machine_id"):
        RequestIds(process_ids=process_ids, machine=1 << 14)


async def test_sixty_four_at_once() -> None:
    async with Pair() as pair:

        async def one(n: int) -> None:
            prompt = [n + 1, *PROMPT]
            offers: list[EngineHandOff] = []
            asked = work(prompt, phase=Phase.PREFILL, name=f"r{n}")
            first = await pair.prefill.prefill(asked, offers.append)
            asked = work(
                prompt,
                phase=Phase.DECODE,
                answer_ids=first.token_ids,
                hand_off=offers[0],
                name=f"r{n}",
            )
            rest = await told(pair.decode, asked)
            assert [*first.token_ids, *ids(rest)] == toy_answer(prompt, 8)

        async with asyncio.TaskGroup() as tasks:
            for n in range(64):
                tasks.create_task(one(n))
        assert pair.world.fetched == 64
