import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import nats
import pytest

from diptych_chassis import beats
from diptych_chassis.beats import BeatThread
from diptych_chassis.vitals import Readiness, Vitals
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import decode
from diptych_identity.roles import Role
from diptych_testkit.guarded_nats import GuardedNats, guarded_nats

ME = Incarnation("gateway-1")


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[GuardedNats]:
    with guarded_nats(tmp_path) as bus:
        yield bus


class Heard:
    """Beats as another process hears them."""

    def __init__(self, client: nats.aio.client.Client) -> None:
        self.client = client
        self.beats: list[Beat] = []

    async def hear(self, message: nats.aio.msg.Msg) -> None:
        self.beats.append(decode(message.data, Beat))

    async def until(self, is_so: Callable[[Beat], bool]) -> Beat:
        await eventually(lambda: any(is_so(beat) for beat in self.beats))
        return next(beat for beat in self.beats if is_so(beat))


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.fixture
async def heard(bus: GuardedNats) -> AsyncIterator[Heard]:
    client = await bus.client(reconnect_time_wait=0.05)
    heard = Heard(client)
    await client.subscribe("beat.*", cb=heard.hear)
    await client.flush()
    yield heard
    await client.close()


def beating(bus: GuardedNats) -> tuple[BeatThread, Vitals]:
    vitals = Vitals(time.monotonic())
    access = bus.access(Role.GATEWAY, ME)
    return BeatThread(ME, "gateway", url=bus.url, vitals=vitals, access=access), vitals


def alone() -> tuple[BeatThread, Vitals]:
    vitals = Vitals(time.monotonic())
    return BeatThread(ME, "gateway", url="nats://127.0.0.1:9", vitals=vitals), vitals


async def test_beats_go_on_while_the_main_loop_is_busy(bus: GuardedNats, heard: Heard) -> None:
    thread, _ = beating(bus)
    thread.start()
    try:
        await heard.until(lambda beat: beat.count == 1)
        time.sleep(0.6)  # noqa: ASYNC251 - the point: this loop is blocked
        last = await heard.until(lambda beat: beat.count >= 6)
    finally:
        thread.stop()
    assert (last.member, last.service, last.pid) == (ME, "gateway", os.getpid())


async def test_beats_carry_readiness_and_are_noted(bus: GuardedNats, heard: Heard) -> None:
    thread, vitals = beating(bus)
    began_s = time.monotonic()
    thread.start()
    try:
        first = await heard.until(lambda beat: True)
        assert (first.ready, first.detail) == (False, "starting")
        vitals.patience_s = 2.5
        patient = await heard.until(lambda beat: beat.patience_ms > 0)
        assert patient.patience_ms == 2500
        vitals.report(Readiness(ready=True))
        ready = await heard.until(lambda beat: beat.ready)
    finally:
        thread.stop()
    sent_s = vitals.beat_sent_s(ready.count)
    assert sent_s is not None
    assert began_s <= sent_s <= time.monotonic()


async def test_beats_come_back_with_the_server_and_none_are_late(
    bus: GuardedNats, heard: Heard
) -> None:
    thread, vitals = beating(bus)
    thread.start()
    try:
        await heard.until(lambda beat: True)
        await bus.server.kill()
        await eventually(lambda: not heard.client.is_connected)
        await asyncio.sleep(0.3)
        heard.beats.clear()
        back_s = time.monotonic()
        await bus.server.start()
        await heard.until(lambda beat: True)
        await asyncio.sleep(0.3)
    finally:
        thread.stop()
    for beat in heard.beats:
        sent_s = vitals.beat_sent_s(beat.count)
        assert sent_s is not None
        assert sent_s >= back_s


async def test_it_waits_for_a_server_that_comes_later(bus: GuardedNats) -> None:
    await bus.server.stop()
    thread, vitals = beating(bus)
    thread.start()
    try:
        assert vitals.beat_sent_s(1) is None
        await bus.server.start()
        await eventually(lambda: vitals.beat_sent_s(1) is not None)
        assert vitals.readiness.ready is False, "beating is not serving"
    finally:
        thread.stop()
        await bus.server.stop()


class Fragile:
    """A client: the first one loses its connection after a beat, and tries no more."""

    made: "list[Fragile]"

    def __init__(self, _access: object) -> None:
        self.made.append(self)
        self.sent = 0

    async def connect_as(self, _url: str, **_options: object) -> None:
        pass

    @property
    def gave_up(self) -> bool:
        return self is self.made[0] and self.sent > 0

    @property
    def is_connected(self) -> bool:
        return not self.gave_up

    async def publish(self, _subject: str, _data: bytes) -> None:
        self.sent += 1

    async def close(self) -> None:
        pass


async def test_a_client_that_gave_up_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process that lives would be silent for good, and be taken for dead."""
    Fragile.made = []
    monkeypatch.setattr(beats, "IdentifiedClient", Fragile)
    thread, _ = alone()
    thread.start()
    try:
        await eventually(lambda: len(Fragile.made) == 2 and Fragile.made[1].sent > 1)
    finally:
        thread.stop()
    assert Fragile.made[0].sent == 1


def test_stopping_does_not_need_a_server() -> None:
    thread, _ = alone()
    thread.start()
    began_s = time.monotonic()
    thread.stop()
    assert time.monotonic() - began_s < 30


def test_stopping_what_never_started_is_fine() -> None:
    thread, vitals = alone()
    thread.stop()
    assert vitals.beat_sent_s(1) is None


@pytest.mark.parametrize("leaving", [True, False])
async def test_who_goes_as_it_should_says_so_last(
    bus: GuardedNats, heard: Heard, leaving: bool
) -> None:
    thread, _ = beating(bus)
    thread.start()
    await eventually(lambda: bool(heard.beats))
    await asyncio.to_thread(thread.stop, leaving=leaving)
    if leaving:
        await heard.until(lambda beat: beat.leaving)
    assert [beat.leaving for beat in heard.beats[:-1]] == [False] * (len(heard.beats) - 1)
    assert heard.beats[-1].leaving is leaving
