import pytest

from diptych_contracts.ids import TransferId
from diptych_kvlink.ledger import OPEN, State, Transfer, TransferLedger

ID = TransferId("r.1")
ENDS = (State.RELEASED, State.EXPIRED, State.FAILED)


def transfer_in(state: State, deadline_s: float = 10.0) -> Transfer:
    transfer = Transfer(transfer_id=ID, deadline_s=deadline_s)
    for step in OPEN[1 : OPEN.index(state) + 1]:
        transfer.advance(step, deadline_s=deadline_s)
    return transfer


@pytest.mark.parametrize("state", OPEN)
def test_every_open_state_expires_at_its_deadline(state: State) -> None:
    transfer = transfer_in(state)

    assert not transfer.expire(9.99)
    assert transfer.expire(10.0)

    assert transfer.state is State.EXPIRED
    assert state in transfer.reason
    assert not transfer.expire(11.0)


@pytest.mark.parametrize("end", ENDS)
def test_nothing_leaves_an_end(end: State) -> None:
    transfer = transfer_in(State.WRITING)
    assert transfer.end(end, "over")

    assert not transfer.end(State.FAILED, "again")
    with pytest.raises(ValueError, match="cannot go"):
        transfer.advance(State.WRITTEN, deadline_s=99.0)

    assert (transfer.state, transfer.reason) == (end, "over")


def test_states_only_move_down() -> None:
    transfer = transfer_in(State.WRITTEN)

    with pytest.raises(ValueError, match="cannot go"):
        transfer.advance(State.WRITING, deadline_s=99.0)
    with pytest.raises(ValueError, match="not an end"):
        transfer.end(State.VERIFIED, "no")


def test_renewal_is_for_a_writer_that_has_not_finished() -> None:
    writing, written = transfer_in(State.WRITING), transfer_in(State.WRITTEN)

    writing.renew(20.0)
    writing.renew(5.0)
    written.renew(20.0)

    assert (writing.deadline_s, written.deadline_s) == (20.0, 10.0)


@pytest.mark.parametrize("end", ENDS)
def test_a_transfer_is_held_until_both_sides_have_stopped(end: State) -> None:
    ledger, transfer = TransferLedger(), transfer_in(State.VERIFIED)
    transfer.reader_may_read = True
    ledger.add(transfer)
    transfer.end(end, "over")

    assert ledger.take_settled() == []
    transfer.writer_may_write = False
    assert ledger.take_settled() == []
    transfer.reader_may_read = False
    assert ledger.take_settled() == [transfer]

    assert ledger.get(ID) is None
    assert ledger.how_ended(ID) == f"{end}: over"
    ledger.check()


def test_ended_ids_are_remembered_up_to_a_bound() -> None:
    ledger = TransferLedger(remembered=2)
    for number in range(4):
        transfer = Transfer(transfer_id=TransferId(str(number)), deadline_s=1.0)
        ledger.add(transfer)
        transfer.writer_may_write = False
        transfer.end(State.RELEASED, "done")
        ledger.take_settled()

    assert ledger.how_ended(TransferId("1")) is None
    with pytest.raises(ValueError, match="exists already"):
        ledger.add(Transfer(transfer_id=TransferId("3"), deadline_s=1.0))


def test_its_steps_tell_the_way_and_when() -> None:
    times = iter((2.0, 3.5, 7.25))
    transfer = Transfer(transfer_id=ID, deadline_s=9.0, opened_s=1.0, clock=lambda: next(times))
    transfer.advance(State.WRITING, deadline_s=9.0)
    transfer.advance(State.WRITTEN, deadline_s=9.0)
    transfer.end(State.FAILED, "checksum")
    transfer.end(State.EXPIRED, "too late to count")

    assert transfer.steps == [
        (State.RESERVED, "", 1.0),
        (State.WRITING, "", 2.0),
        (State.WRITTEN, "", 3.5),
        (State.FAILED, "checksum", 7.25),
    ]


def test_those_that_are_over_are_found_by_how_their_id_begins() -> None:
    ledger = TransferLedger()
    for name in ("ab1.1", "ab1.2", "ab2.1", "c.1"):
        transfer = Transfer(transfer_id=TransferId(name), deadline_s=1.0)
        ledger.add(transfer)
        transfer.writer_may_write = False
        transfer.end(State.RELEASED, "done")
    ledger.take_settled()

    assert [name for name, _ in ledger.over_about("ab1", most=9)] == ["ab1.2", "ab1.1"]
    assert [name for name, _ in ledger.over_about("ab", most=2)] == ["ab2.1", "ab1.2"]
    assert ledger.over_about("d", most=9) == []


def test_check_finds_reading_before_verification() -> None:
    transfer = transfer_in(State.WRITING)
    transfer.reader_may_read = True

    with pytest.raises(AssertionError, match="before verification"):
        transfer.check()
