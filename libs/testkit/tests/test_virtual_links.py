import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from diptych_contracts.errors import LinkBroken, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import SlotRef
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.port import CLOSED
from diptych_testkit.virtual_links import LinkWeather, Network, VirtualTarget, VirtualWriter
from diptych_testkit.virtual_time import BEGIN_S, run_virtually

WRITER = Incarnation("p1")
REF = SlotRef(slot=1, generation=7)


def a_pair(network: Network, kind: str) -> tuple[VirtualTarget, VirtualWriter]:
    """A pool whose slot 1 is open to the writer, and the writer's side of it."""
    (target,) = network.open_targets((kind,), name="d1", shape=PoolShape(slots=2, slot_bytes=64))
    network.announce(WRITER)
    target.expect(WRITER)
    target.admit(REF.slot, REF.generation, WRITER)
    writer = network.open_link(target.endpoint, writer=WRITER)
    writer.connect()
    return target, writer


def virtually(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: run_virtually(test())


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_bytes_arrive_and_a_closed_slot_takes_none(kind: str) -> None:
    target, writer = a_pair(Network(), kind)
    buffer = writer.buffer(REF)
    buffer[:3] = b"abc"
    writer.send([(REF, buffer[:3])])
    assert target.view(REF.slot, 3) == b"abc"
    target.admit(REF.slot, CLOSED)
    with pytest.raises(Refused):
        writer.buffer(REF)


def test_over_shm_a_writer_can_touch_a_slot_that_was_closed_and_the_reader_knows() -> None:
    target, writer = a_pair(Network(), "shm")
    buffer = writer.buffer(REF)
    target.admit(REF.slot, CLOSED)
    buffer[:1] = b"x"
    assert target.view(REF.slot, 1) == b"x"
    assert (target.is_idle(REF), target.stops_writers) == (False, False)
    writer.stop(REF)
    assert target.is_idle(REF)


def test_over_tcp_nothing_comes_into_a_closed_slot() -> None:
    target, writer = a_pair(Network(), "tcp")
    buffer = writer.buffer(REF)
    buffer[:1] = b"x"
    target.admit(REF.slot, CLOSED)
    with pytest.raises(Refused):
        writer.send([(REF, buffer[:1])])
    assert target.view(REF.slot, 1) == b"\0"


def test_only_a_writer_that_was_seen_can_be_known_dead() -> None:
    network = Network()
    target, _ = a_pair(network, "shm")
    assert not target.is_dead(WRITER)
    network.announce(WRITER).close()
    assert target.is_dead(WRITER)
    assert not target.is_dead(Incarnation("stranger"))


def test_a_reader_that_is_gone_breaks_the_link() -> None:
    target, writer = a_pair(Network(), "tcp")
    buffer = writer.buffer(REF)
    target.close()
    assert writer.reader_is_gone()
    with pytest.raises(LinkBroken):
        writer.send([(REF, buffer)])


@virtually
async def test_a_slow_link_takes_its_time() -> None:
    network = Network()
    network.weather = LinkWeather(latency_s=0.5, bytes_per_s=64.0)
    _, writer = a_pair(network, "shm")
    thread = network.thread(writer)
    buffer = writer.buffer(REF)
    sent = thread.submit(writer.send, [(REF, buffer)])
    await asyncio.wrap_future(sent)
    assert asyncio.get_running_loop().time() == BEGIN_S + 1.5
