"""The follower against a journal whose live messages get lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from diptych_bus.jetstream import direct
from diptych_bus.jetstream.following import Follower
from diptych_bus.lifetime import Lifetime
from diptych_bus.port import JournalItem
from diptych_contracts.errors import BusAway
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import Fence
from diptych_contracts.wire import encode

GATEWAY = Incarnation("g")


class Quiet:
    async def close(self) -> None:
        pass


class Journal:
    """A stored journal, and a connection that delivers what the test lets through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lifetime = Lifetime()
        self.stored: list[Msg] = []
        self.reads = 0
        self.failures = 0
        self.live: Callable[[Msg], None] = lambda _: None
        self.up: Callable[[], None] = lambda: None
        monkeypatch.setattr(direct, "last_on", self._last_on)
        monkeypatch.setattr(direct, "all_on", self._all_on)

    async def listen_for_others(self, _subject: str, handler: Callable[[Msg], None]) -> Quiet:
        self.live = handler
        return Quiet()

    def watch_link(self, *, up: Callable[[], None]) -> Callable[[], None]:
        self.up = up
        return lambda: None

    def store(self, *, seq: int, lost: bool = False) -> None:
        previous = direct.seq_of(self.stored[-1]) if self.stored else 0
        headers = {"Nats-Sequence": str(seq), "Nats-Last-Sequence": str(previous)}
        data = encode(Fence(request_id=RequestId("r"), attempt=seq))
        msg = Msg(_client=Client(), subject="live.g", data=data, headers=headers)
        self.stored.append(msg)
        if not lost:
            self.live(msg)

    async def _last_on(self, *_: Any) -> Msg | None:
        return self.stored[-1] if self.stored else None

    async def _all_on(self, *_: Any, after_seq: int) -> AsyncIterator[Msg]:
        self.reads += 1
        if self.failures:
            self.failures -= 1
            raise BusAway("not yet")
        for msg in tuple(self.stored):
            if direct.seq_of(msg) > after_seq:
                await asyncio.sleep(0)
                yield msg


@pytest.fixture
async def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    return Journal(monkeypatch)


async def followed(
    journal: Journal, seen: list[int], *, active: Callable[[], bool] = lambda: True
) -> Follower:
    def note(item: JournalItem) -> None:
        seen.append(item.seq)

    follower = Follower(journal, GATEWAY, handler=note, active=active)  # type: ignore[arg-type]
    await follower.start(None)
    await eventually(lambda: journal.reads == 1)
    await asyncio.sleep(0)
    return follower


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_live_messages_come_without_reading(journal: Journal) -> None:
    seen: list[int] = []
    follower = await followed(journal, seen)

    for seq in (1, 2, 5):
        journal.store(seq=seq)

    assert seen == [1, 2, 5]
    assert journal.reads == 1
    await follower.close()


async def test_a_gap_is_read_from_the_stream(journal: Journal) -> None:
    seen: list[int] = []
    follower = await followed(journal, seen)

    journal.store(seq=1)
    journal.store(seq=2, lost=True)
    journal.store(seq=3)
    journal.store(seq=4)

    await eventually(lambda: len(seen) >= 4)
    assert seen == [1, 2, 3, 4]
    journal.store(seq=5)
    await eventually(lambda: len(seen) >= 5)
    assert seen == [1, 2, 3, 4, 5]
    await follower.close()


async def test_messages_during_a_repair_are_neither_lost_nor_doubled(
    journal: Journal,
) -> None:
    seen: list[int] = []
    follower = await followed(journal, seen)
    journal.store(seq=1, lost=True)
    journal.store(seq=2)

    for seq in range(3, 200):
        journal.store(seq=seq, lost=seq % 7 == 0)
        await asyncio.sleep(0)

    await eventually(lambda: len(seen) == 199)
    assert seen == list(range(1, 200))
    await follower.close()


async def test_a_lost_last_message_is_found_by_silence(journal: Journal) -> None:
    seen: list[int] = []
    follower = await followed(journal, seen)

    journal.store(seq=1, lost=True)
    assert seen == []

    await eventually(lambda: bool(seen))
    assert seen == [1]
    await follower.close()


async def test_silence_is_no_matter_while_nobody_waits(journal: Journal) -> None:
    seen: list[int] = []
    follower = await followed(journal, seen, active=lambda: False)

    journal.store(seq=1, lost=True)
    await asyncio.sleep(0.6)
    assert seen == []

    journal.up()
    await eventually(lambda: seen == [1])
    await follower.close()


async def test_a_failed_repair_is_tried_again(journal: Journal) -> None:
    seen: list[int] = []
    follower = await followed(journal, seen)
    journal.failures = 2

    journal.store(seq=1, lost=True)
    journal.up()

    await eventually(lambda: seen == [1])
    assert journal.reads == 4
    await follower.close()
