from random import Random

from diptych_policy.sightings import Sightings


def block(number: int) -> str:
    return f"{number:016x}{number:048x}"


def test_a_block_is_written_at_its_second_sighting() -> None:
    seen = Sightings()
    assert [seen.see(block(1)) for _ in range(2)] == [False, True]
    assert not seen.see(block(2))


def test_what_was_not_taken_is_wanted_again_and_what_was_is_not() -> None:
    seen = Sightings()
    seen.see(block(1))
    assert seen.see(block(1))
    assert seen.see(block(1))
    seen.written(block(1))
    assert not seen.see(block(1))


def test_what_the_tiers_lost_is_wanted_again() -> None:
    seen = Sightings()
    seen.see(block(1))
    seen.written(block(1))
    seen.lost(block(1))
    assert seen.see(block(1))


def test_what_was_found_in_a_tier_is_not_wanted_although_never_seen_here() -> None:
    seen = Sightings()
    seen.written(block(1))
    assert not seen.see(block(1))


def test_losing_what_was_never_seen_is_no_sighting() -> None:
    seen = Sightings()
    seen.lost(block(1))
    assert not seen.see(block(1))


def test_two_sightings_too_far_apart_are_two_first_ones() -> None:
    seen = Sightings(window=10)
    seen.see(block(0))
    for number in range(1, 21):
        seen.see(block(number))
    assert not seen.see(block(0))


def test_what_is_in_use_stays_known() -> None:
    seen = Sightings(window=10)
    seen.written(block(0))
    for number in range(1, 200):
        seen.see(block(number))
        assert not seen.see(block(0))
    seen.lost(block(0))
    assert seen.see(block(0))


def test_memory_is_bounded_whatever_comes() -> None:
    seen, rng = Sightings(window=50), Random(7)
    for _ in range(5000):
        name = block(rng.randrange(1000))
        rng.choice((seen.see, seen.written, seen.lost))(name)
        assert len(seen) <= 100


def test_how_often_a_block_must_be_seen_can_be_told() -> None:
    at_once, third = Sightings(needed=1), Sightings(needed=3)
    assert at_once.see(block(1))
    assert [third.see(block(1)) for _ in range(4)] == [False, False, True, True]
    at_once.written(block(1))
    assert not at_once.see(block(1))
    at_once.lost(block(1))
    assert at_once.see(block(1))
