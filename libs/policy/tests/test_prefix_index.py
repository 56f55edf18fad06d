from diptych_contracts.blocks import BlocksChanged, BlocksSnapshot
from diptych_contracts.ids import Incarnation
from diptych_policy.prefix_index import PrefixIndex

W = Incarnation("w")


def changed(event_id: int, stored: tuple[int, ...] = (), removed: tuple[int, ...] = ()) -> object:
    return BlocksChanged(worker=W, event_id=event_id, stored=stored, removed=removed)


def snapshot(event_id: int, *stored: int) -> BlocksSnapshot:
    return BlocksSnapshot(worker=W, event_id=event_id, stored=stored)


def test_an_unknown_worker_has_nothing() -> None:
    index = PrefixIndex()
    assert W not in index
    assert index.overlap_blocks(W, (1, 2)) == 0


def test_events_in_order_are_followed() -> None:
    index = PrefixIndex()
    assert not index.changed(changed(1, (1, 2, 3)))
    assert not index.changed(changed(2, (4,), (2,)))
    assert W in index
    assert index.overlap_blocks(W, (1, 3, 4)) == 3
    assert index.overlap_blocks(W, (1, 2, 3)) == 1
    assert index.overlap_blocks(W, (5, 1)) == 0
    assert index.overlap_blocks(W, ()) == 0


def test_a_repeated_event_changes_nothing() -> None:
    index = PrefixIndex()
    index.changed(changed(1, (1,)))
    index.changed(changed(2, (), (1,)))
    assert not index.changed(changed(1, (1,)))
    assert index.overlap_blocks(W, (1,)) == 0


def test_a_gap_asks_for_a_snapshot_and_what_was_known_stands_until_then() -> None:
    index = PrefixIndex()
    index.changed(changed(1, (1,)))
    assert index.changed(changed(3, (3,)))
    assert index.overlap_blocks(W, (1, 2)) == 1
    assert not index.told(snapshot(3, 1, 2, 3))
    assert index.overlap_blocks(W, (1, 2, 3)) == 3
    assert not index.changed(changed(4, (4,)))


def test_one_who_comes_late_asks_too() -> None:
    assert PrefixIndex().changed(changed(7, (1,)))


def test_a_snapshot_older_than_what_was_heard_asks_for_another() -> None:
    index = PrefixIndex()
    index.changed(changed(5, (5,)))
    assert index.told(snapshot(3, 1))
    assert not index.told(snapshot(5, 1, 5))
    assert not index.told(snapshot(4, 9))
    assert index.overlap_blocks(W, (1, 5)) == 2


def test_a_gap_that_is_filled_late_is_no_gap() -> None:
    index = PrefixIndex()
    assert index.changed(changed(2, (2,)))
    assert index.changed(changed(1, (1,)))
    assert not index.changed(changed(2, (2,)))
    assert index.overlap_blocks(W, (1, 2)) == 2


def test_the_index_is_bounded_and_a_lost_worker_forgotten() -> None:
    index = PrefixIndex(blocks_per_worker=2)
    index.changed(changed(1, (1, 2, 3)))
    assert index.overlap_blocks(W, (1, 2, 3)) == 2
    index.forget(W)
    assert W not in index
    assert index.overlap_blocks(W, (1,)) == 0
