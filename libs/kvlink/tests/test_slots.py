import pytest

from diptych_contracts.errors import Refused
from diptych_kvlink.slots import SlotPool


def test_a_slot_comes_back_under_a_new_generation() -> None:
    pool = SlotPool(1)
    (first,) = pool.take(1)
    pool.free([first])

    (second,) = pool.take(1)

    assert second.slot == first.slot
    assert second.generation > first.generation
    with pytest.raises(ValueError, match="not held"):
        pool.free([first])


def test_exhaustion_is_refused_with_the_figures() -> None:
    pool = SlotPool(3)
    held = pool.take(2)
    pool.quarantine(held[:1])

    with pytest.raises(Refused, match=r"needs 2 .* 1 of 3 are free \(1 in quarantine\)") as caught:
        pool.take(2)

    assert caught.value.reason == "no_room"
    assert (pool.used, pool.quarantined) == (2, 1)
    pool.check()


def test_a_quarantined_slot_is_never_handed_out() -> None:
    pool = SlotPool(2)
    (bad,) = pool.take(1)
    pool.quarantine([bad])
    pool.quarantine([bad])

    for _ in range(4):
        (good,) = pool.take(1)
        assert good.slot != bad.slot
        pool.free([good])
        pool.check()

    pool.free([bad])
    assert (pool.used, pool.quarantined) == (0, 0)


def test_the_slot_longest_free_is_next() -> None:
    pool = SlotPool(3)
    first = pool.take(1)
    pool.free(first)

    assert [ref.slot for ref in pool.take(3)] == [1, 2, 0]


def test_a_pool_has_slots() -> None:
    with pytest.raises(ValueError, match="no fewer than 0"):
        SlotPool(-1)
