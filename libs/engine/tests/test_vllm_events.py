"""KV events over real ZMQ sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import EngineGone
from diptych_engine.over_http.salts import Salts
from diptych_engine.request_port import KvCleared, KvEvent, KvRemoved, KvStored
from diptych_engine.vllm.kv_events import BlockChains, KvListener
from diptych_testkit.fake_engines.vllm_events import (
    FakeVllmEvents,
    cleared,
    positional,
    removed,
    stored,
)

FIRST = KvStored((1, 2, 3, 4), (11,))
BOTH = KvStored((1, 2, 3, 4, 5, 6, 7, 8), (11, 12))


def untold(event: KvEvent) -> KvEvent:
    """Without the tenant, for comparing."""
    return KvStored(event.token_ids, event.engine_hashes) if isinstance(event, KvStored) else event


@asynccontextmanager
async def heard(
    publisher: FakeVllmEvents,
) -> AsyncIterator[Callable[[], Any]]:
    listener = KvListener(
        publisher.endpoint, BlockChains(Salts()), replay=publisher.replay, topic="kv"
    )
    events: AsyncGenerator[KvEvent, None] = listener.events()
    async with aclosing(events):

        async def after() -> KvEvent:
            async with asyncio.timeout(60):
                return untold(await anext(events))

        assert await after() == KvCleared()
        pending = asyncio.ensure_future(after())
        await asyncio.to_thread(publisher.wait_for_listener)

        async def following() -> KvEvent:
            nonlocal pending
            event = await pending
            pending = asyncio.ensure_future(after())
            return event

        try:
            yield following
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


@pytest.fixture(params=[True, False], ids=["replays", "alone"])
def publisher(request: pytest.FixtureRequest) -> Any:
    found = FakeVllmEvents(replays=request.param)
    yield found
    found.close()


@pytest.mark.parametrize("form", [dict, positional], ids=["map", "positional"])
async def test_both_forms_are_read(publisher: FakeVllmEvents, form: Callable[..., Any]) -> None:
    async with heard(publisher) as following:
        publisher.publish(form(stored([11], [1, 2, 3, 4])))
        publisher.publish(form(stored([12], [5, 6, 7, 8], parent=11)), form(removed(12)))
        publisher.publish(form(cleared()))
        told = [await following() for _ in range(4)]
    assert told == [FIRST, BOTH, KvRemoved((12,)), KvCleared()]


async def test_what_was_lost_is_told_again_or_nothing_is_known(publisher: FakeVllmEvents) -> None:
    async with heard(publisher) as following:
        publisher.publish(stored([11], [1, 2, 3, 4]))
        assert await following() == FIRST
        publisher.publish(stored([12], [5, 6, 7, 8], parent=11), lost=True)
        publisher.publish(removed(12))
        if publisher.replay:
            assert [await following() for _ in range(2)] == [BOTH, KvRemoved((12,))]
        else:
            assert [await following() for _ in range(2)] == [KvCleared(), KvRemoved((12,))]


async def test_a_gap_that_replay_cannot_fill_clears() -> None:
    publisher = FakeVllmEvents()
    async with heard(publisher) as following:
        publisher.publish(stored([11], [1, 2, 3, 4]))
        await following()
        publisher.publish(stored([12], [5, 6, 7, 8], parent=11), lost=True)
        publisher.forget_all()
        publisher.publish(stored([21], [9, 9, 9, 9]))
        assert await following() == KvCleared()
        assert await following() == KvStored((9, 9, 9, 9), (21,))
    publisher.close()


async def test_a_server_that_starts_again_knows_nothing(publisher: FakeVllmEvents) -> None:
    async with heard(publisher) as following:
        for n in range(3):
            publisher.publish(stored([n], [n] * 4))
            await following()
        publisher.restart()
        publisher.publish(stored([11], [1, 2, 3, 4]))
        assert [await following() for _ in range(2)] == [KvCleared(), FIRST]


async def test_who_comes_late_is_told_what_was(publisher: FakeVllmEvents) -> None:
    publisher.publish(stored([11], [1, 2, 3, 4]))
    async with heard(publisher) as following:
        publisher.publish(stored([12], [5, 6, 7, 8], parent=11))
        if publisher.replay:
            assert [await following() for _ in range(2)] == [FIRST, BOTH]
        else:  # the parent was told of before: nobody knows its tokens
            publisher.publish(stored([21], [9, 9, 9, 9]))
            assert await following() == KvStored((9, 9, 9, 9), (21,))


def events_of(chains: BlockChains, *events: Any) -> list[KvEvent]:
    return list(chains.events(msgspec.msgpack.encode([1.0, events])))


def test_blocks_are_of_the_tenant_whose_salt_they_have() -> None:
    salts = Salts()
    chains = BlockChains(salts)
    salt = salts.salt("acme")
    first = stored([1, 2], range(8), extra_keys=[[salt], None])
    second = stored([3], range(8, 12), parent=2, extra_keys=[None])
    assert [e.tenant for e in events_of(chains, first, second) if isinstance(e, KvStored)] == [
        "acme",
        "acme",
    ]
    (plain,) = events_of(chains, stored([5], range(4), extra_keys=[None]))
    assert isinstance(plain, KvStored)
    assert plain.tenant == ""
    strange = stored([6], range(4), extra_keys=[["of another client"]])
    assert events_of(chains, strange) == []


def test_only_blocks_of_tokens_alone_on_the_gpu_count() -> None:
    chains = BlockChains(Salts())
    assert events_of(chains, stored([1], range(4), medium="CPU")) == []
    assert events_of(chains, stored([1], range(4), lora_name="x")) == []
    assert events_of(chains, stored([1], range(4), group_idx=1)) == []
    assert events_of(chains, {"type": "SomethingNew", "a": 1}) == []
    assert len(events_of(chains, stored([b"\x01\x00"], range(4), medium="GPU"))) == 1
    assert events_of(chains, removed(b"\x01\x00", medium="GPU")) == [KvRemoved((256,))]


def test_a_block_behind_one_that_is_gone_is_not_told() -> None:
    chains = BlockChains(Salts())
    events_of(chains, stored([1], range(4)), removed(1))
    assert events_of(chains, stored([2], range(4, 8), parent=1)) == []


def test_what_is_remembered_is_bounded() -> None:
    chains = BlockChains(Salts(), most_blocks=2)
    events_of(chains, *(stored([n], [n] * 4) for n in range(3)))
    assert events_of(chains, stored([9], range(4), parent=0)) == []
    assert len(events_of(chains, stored([9], range(4), parent=2))) == 1


@pytest.mark.parametrize("batch", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x01"])
def test_what_cannot_be_read_is_an_error(batch: bytes) -> None:
    with pytest.raises(EngineGone):
        list(BlockChains(Salts()).events(batch))
