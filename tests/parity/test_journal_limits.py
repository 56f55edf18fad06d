"""A journal that has made room: both buses say what is left of it."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.memory import MemoryBroker
from diptych_bus.port import Bus, Span
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import Fence
from diptych_contracts.streams import STREAMS, TOKENS
from diptych_testkit.nats import running_nats

GATEWAY, OTHER = Incarnation("gateway-1"), Incarnation("gateway-2")
SMALL = dataclasses.replace(TOKENS, max_bytes=4096)
STREAMS_WITH_A_SMALL_JOURNAL = (*(spec for spec in STREAMS if spec is not TOKENS), SMALL)


@pytest.fixture(params=["memory", "jetstream"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    made: Bus
    if request.param == "memory":
        made = MemoryBroker(streams=STREAMS_WITH_A_SMALL_JOURNAL).connect("test")
        yield made
        await made.close()
        return
    with running_nats(tmp_path / "nats") as server:
        made = await JetStreamBus.connect(
            server.url, name="test", wait_s=60.0, streams=STREAMS_WITH_A_SMALL_JOURNAL
        )
        yield made
        await made.close()


def fence(attempt: int) -> Fence:
    return Fence(request_id=RequestId("r"), attempt=attempt)


async def test_a_journal_that_never_held_anything_lacks_nothing(bus: Bus) -> None:
    assert await bus.span() == Span(first_seq=1, last_seq=0)
    assert (await bus.span()).covers(0)


async def test_the_oldest_entries_are_gone_and_that_can_be_told(bus: Bus) -> None:
    for attempt in range(1, 101):
        await bus.record(GATEWAY if attempt % 2 else OTHER, fence(attempt), timeout_s=60)

    span = await bus.span()
    read = [item async for item in bus.read(GATEWAY, after_seq=0)]

    assert span.last_seq == 100
    assert 1 < span.first_seq < 100
    assert span.first_seq <= read[0].seq <= span.first_seq + 1
    assert not span.covers(span.first_seq - 2)
    assert span.covers(span.first_seq - 1)
    assert span.covers(100)
