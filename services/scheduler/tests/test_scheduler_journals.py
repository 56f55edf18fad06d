"""A dead gateway's journal is left once nobody needs it, and not a moment before.

A request of a gateway that had died since was taken on while the journal was being left: nobody
heard its end, and it stayed open for ever.
"""

from typing import Any

import pytest

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.port import Span
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import Event, RequestArrived
from diptych_policy.recovery import Ledger
from diptych_scheduler.intake import Intake
from diptych_scheduler.journals import Journals
from diptych_testkit.builders import GATEWAY, REQUEST, a_request


class Room:
    """Journals whose scheduler looks for idle ones whenever the bus is asked how far it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bus: MemoryBus = MemoryBroker().connect("s1")
        self.ledger = Ledger(Incarnation("s1"), Fleet())
        self.told: list[Event] = []
        self.journals = Journals(self.bus, self.ledger, self.tell)
        self._span = self.bus.span
        monkeypatch.setattr(self.bus, "span", self.span)

    def tell(self, event: Event) -> None:
        self.told.append(event)
        self.ledger.handle(event, now_s=0.0, unix_ms=0)

    async def span(self) -> Span:
        await self.journals.unfollow_idle(lambda _: False)
        return await self._span()

    @property
    def followed(self) -> set[Incarnation]:
        return set(self.journals._followed)


class Nothing:
    """Records that nobody writes."""

    def expect(self, *_: Any) -> None: ...

    def expected(self) -> tuple[()]:
        return ()


async def test_a_dead_gateways_request_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch)
    intake = Intake(
        room.bus,
        room.journals,
        records=Nothing(),
        tell=room.tell,
        recorded=lambda _: False,
        seq_of=lambda _: 0,
    )
    stored: Any = type("Stored", (), {"decode": lambda _self, _kind: a_request()})()
    pulled: Any = type("Pulled", (), {"stored_unix_ms": 0})()
    await intake._take_on(pulled, 1, stored, 1)
    assert [type(event) for event in room.told] == [RequestArrived]
    assert room.followed == {GATEWAY}
    await room.bus.close()


async def test_a_journal_is_followed_while_it_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch)
    record = RequestRecord(
        request_id=REQUEST,
        owner=Incarnation("s0"),
        gateway=GATEWAY,
        state=RecordState.ROUTED,
        request_seq=1,
    )
    await room.journals.history(record)
    assert room.followed == {GATEWAY}
    await room.journals.unfollow_idle(lambda _: False)
    assert room.followed == set()
    await room.bus.close()
