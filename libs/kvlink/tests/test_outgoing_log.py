from typing import Any

import pytest

from diptych_contracts.errors import Refused
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import RefusalReason
from diptych_kvlink.ledger import State
from diptych_kvlink.outgoing import OutgoingTransfer
from diptych_kvlink.outgoing_log import OutgoingLog

WRITER, READER = Incarnation("p-1"), Incarnation("d-1")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> OutgoingLog:
    return OutgoingLog(WRITER, clock=clock, remembered=2)


def test_a_story_is_told_from_the_question_on(log: OutgoingLog, clock: Clock) -> None:
    with log.story(TransferId("r.1"), reader=READER) as story:
        story.asks("shm", until_s=110.0)
        clock.now_s = 101.0
        story.asks("tcp", until_s=111.0, why="shm cannot be opened")
        (going,) = log.transfers()
        assert (going.state, going.link, going.reader) == ("asked", "tcp", READER)
        assert (going.age_ms, going.left_ms, going.ended_ms) == (1000, 10_000, 0)
        story.handed_over(remainder_s=0.0055)
    clock.now_s = 103.0

    assert log.transfers() == []
    (over,) = log.about("r")
    assert (over.state, over.reason, over.remainder_ms) == ("released", "handed over", 5.5)
    assert (over.age_ms, over.left_ms, over.ended_ms) == (0, 0, 2000)
    assert [(step.state, step.ago_ms, step.reason) for step in over.steps] == [
        ("asked", 3000.0, "shm"),
        ("asked", 2000.0, "tcp: shm cannot be opened"),
        ("released", 2000.0, "handed over"),
    ]


def test_where_an_engine_moves_kv_its_states_have_deadlines_too(
    log: OutgoingLog, clock: Clock
) -> None:
    with log.story(TransferId("r.1"), reader=READER) as story:
        story.asks("engine", until_s=110.0)
        story.reserved(until_s=175.0)
        assert (log.transfers()[0].state, log.transfers()[0].left_ms) == ("reserved", 75_000)
        clock.now_s = 120.0
        story.awaits_answer(until_s=130.0)
        assert (log.transfers()[0].state, log.transfers()[0].left_ms) == ("written", 10_000)
        story.handed_over(remainder_s=0.0)
    (over,) = log.about("r.1")
    assert [step.state for step in over.steps] == ["asked", "reserved", "written", "released"]


def test_what_fails_says_why(log: OutgoingLog) -> None:
    def fail() -> None:
        with log.story(TransferId("r.1"), reader=READER) as story:
            story.asks("shm", until_s=110.0)
            raise Refused(RefusalReason.NO_ROOM, "4 slots are free")

    with pytest.raises(Refused):
        fail()
    (over,) = log.transfers(ended=1)
    assert (over.state, over.reason.endswith("4 slots are free")) == ("failed", True)


def test_one_that_ends_without_a_hand_over_says_so(log: OutgoingLog) -> None:
    with log.story(TransferId("r.1"), reader=READER):
        pass
    (over,) = log.transfers(ended=1)
    assert (over.state, over.reason[:20]) == ("released", "nothing to hand over")


def test_the_first_end_counts_and_the_last_ones_are_kept(log: OutgoingLog) -> None:
    for name in ("a.1", "b.1", "b.2"):
        with log.story(TransferId(name), reader=READER) as story:
            story.end(State.FAILED, name)
            story.end(State.RELEASED, "too late")
    assert [one.reason for one in log.transfers(ended=9)] == ["b.2", "b.1"]
    assert [one.transfer_id for one in log.about("b")] == ["b.2", "b.1"]
    assert log.about("a") == []


async def test_a_ticket_that_the_engine_never_gets_to_ends_with_its_lease(
    log: OutgoingLog, clock: Clock, reader: Any, link_thread: Any
) -> None:
    ticket = reader.reserve(tokens=10)
    link = reader.link()
    link.connect()
    transfer = OutgoingTransfer(
        ticket, link, thread=link_thread, sent_s=clock.now_s, salt=reader.salt, clock=clock
    )
    with log.story(ticket.transfer_id, reader=READER) as story:
        story.opened(transfer)
        clock.now_s = transfer.deadline_s - 0.001
        log.sweep()
        assert log.transfers()[0].state == "reserved"
        clock.now_s = transfer.deadline_s
        log.sweep()
        (told,) = log.about(ticket.transfer_id)
    assert told.state == "expired"
    assert [step.state for step in told.steps] == ["reserved", "expired"]
    assert transfer.close()
