from dataclasses import replace
from random import Random

import pytest

from diptych_policy.prefix_cache import Changes, Hit, Kept, PrefixCache
from diptych_policy.prefixes import Prefix

BLOCK = 4
PLENTY = 1000


def a_prefix(text: str, tenant: str = "t") -> Prefix:
    """One block per letter."""
    return Prefix.of(tenant, "m", [ord(c) for c in text for _ in range(BLOCK)], BLOCK)


def a_cache(ids: int = 3) -> PrefixCache:
    return PrefixCache(range(10, 10 + ids), block_tokens=BLOCK)


def keep(cache: PrefixCache, text: str, room_blocks: int = PLENTY, tenant: str = "t") -> Kept:
    kept = cache.keep(a_prefix(text, tenant), room_cells=room_blocks * BLOCK)
    cache.check()
    assert cache.cells <= room_blocks * BLOCK
    return kept


def test_nothing_is_found_in_an_empty_cache() -> None:
    assert a_cache().match(a_prefix("ab")) is None


def test_what_is_kept_is_found_as_far_as_it_agrees() -> None:
    cache = a_cache()
    assert keep(cache, "abc") == Kept(seq=10, start=0, end=3)
    assert cache.match(a_prefix("abcd")) == Hit(10, 3)
    assert cache.match(a_prefix("abx")) == Hit(10, 2)
    assert cache.match(a_prefix("xbc")) is None
    assert cache.match(a_prefix("")) is None
    assert (cache.cells, cache.sequences) == (3 * BLOCK, 1)


def test_another_tenants_prefix_is_never_found() -> None:
    cache = a_cache()
    keep(cache, "abc")
    assert cache.match(a_prefix("abc", "other")) is None
    assert keep(cache, "abc", tenant="other") == Kept(seq=11, start=0, end=3)


def test_a_forgotten_tenant_leaves_nothing_and_the_others_everything() -> None:
    cache = a_cache()
    keep(cache, "abc")
    keep(cache, "abx")
    keep(cache, "abc", tenant="other")
    cache.changes()
    assert set(cache.forget("t")) == {10, 11}
    cache.check()
    assert cache.match(a_prefix("abc")) is None
    assert cache.match(a_prefix("abc", "other")) == Hit(12, 3)
    assert set(cache.changes().removed) == set(a_prefix("abc").hashes) | set(a_prefix("abx").hashes)
    assert cache.forget("t") == ()


def test_tokens_decide_where_hashes_collide() -> None:
    cache = a_cache()
    keep(cache, "ab")
    collision = replace(a_prefix("xy"), hashes=a_prefix("ab").hashes)
    assert cache.match(collision) is None
    assert cache.match(replace(a_prefix("ab"), tenant="other")) is None
    assert cache.keep(collision, room_cells=PLENTY) == Kept()
    assert cache.match(a_prefix("ab")) == Hit(10, 2)


def test_a_path_that_goes_on_extends_the_one_that_ends_there() -> None:
    cache = a_cache()
    keep(cache, "ab")
    assert keep(cache, "abcd") == Kept(seq=10, start=2, end=4)
    assert keep(cache, "abcd") == Kept()
    assert keep(cache, "abc") == Kept()
    assert (cache.cells, cache.sequences) == (4 * BLOCK, 1)


def test_paths_that_part_share_the_blocks_before() -> None:
    cache = a_cache()
    keep(cache, "abc")
    assert keep(cache, "abxy") == Kept(seq=11, base=10, start=2, end=4)
    assert (cache.cells, cache.sequences) == (5 * BLOCK, 2)
    assert cache.match(a_prefix("abc")) == Hit(10, 3)
    assert cache.match(a_prefix("abxy")) == Hit(11, 4)


def test_the_one_used_longest_ago_goes_first_and_shared_blocks_stay() -> None:
    cache = a_cache()
    keep(cache, "abc")
    keep(cache, "abx")
    keep(cache, "z")
    assert cache.match(a_prefix("abc")) == Hit(10, 3)
    cache.changes()
    assert cache.shrink(4 * BLOCK) == (11,)
    assert cache.changes() == Changes((), a_prefix("abx").hashes[2:])
    assert cache.match(a_prefix("abx")) == Hit(10, 2)
    assert cache.shrink(0) == (12, 10)
    assert (cache.cells, cache.sequences) == (0, 0)
    cache.check()


def test_sequence_ids_are_a_budget_too() -> None:
    cache = a_cache(ids=2)
    keep(cache, "a")
    keep(cache, "b")
    assert keep(cache, "c") == Kept(evicted=(10,), seq=10, start=0, end=1)
    assert keep(cache, "cd") == Kept(seq=10, start=1, end=2)


def test_what_a_new_path_begins_with_is_not_evicted_for_it() -> None:
    cache = a_cache(ids=2)
    keep(cache, "ab")
    keep(cache, "z")
    assert keep(cache, "axx", room_blocks=4) == Kept(evicted=(11,), seq=11, base=10, start=1, end=3)
    one = a_cache(ids=1)
    keep(one, "ab")
    assert keep(one, "ax") == Kept()


def test_as_much_is_kept_as_fits() -> None:
    cache = a_cache()
    keep(cache, "z")
    assert keep(cache, "abcd", room_blocks=2) == Kept(evicted=(10,), seq=10, start=0, end=2)
    assert keep(cache, "abcd", room_blocks=2) == Kept()
    assert keep(cache, "x", room_blocks=2) == Kept(evicted=(10,), seq=10, start=0, end=1)
    assert keep(a_cache(), "x", room_blocks=0) == Kept()


def test_what_came_and_went_between_two_looks_was_never_there() -> None:
    cache = a_cache()
    keep(cache, "ab")
    cache.shrink(0)
    assert cache.changes() == Changes((), ())
    keep(cache, "ab")
    assert cache.changes() == Changes(a_prefix("ab").hashes, ())
    cache.shrink(0)
    keep(cache, "a")
    assert cache.changes() == Changes((), a_prefix("ab").hashes[1:])


def test_what_the_engine_could_not_do_is_undone() -> None:
    cache = a_cache()
    keep(cache, "ab")
    cache.changes()
    cache.undo(keep(cache, "abcd"))
    assert cache.match(a_prefix("abcd")) == Hit(10, 2)
    cache.undo(keep(cache, "axy"))
    assert cache.match(a_prefix("axy")) == Hit(10, 1)
    cache.undo(Kept())
    assert cache.changes() == Changes((), ())
    assert (cache.cells, cache.sequences) == (2 * BLOCK, 1)
    cache.check()


def test_check_finds_a_broken_invariant() -> None:
    cache = a_cache()
    keep(cache, "ab")
    cache._paths[10] = a_prefix("abc")
    with pytest.raises(AssertionError, match="broken invariant"):
        cache.check()


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_obeys_holds_exactly_what_the_index_says(seed: int) -> None:
    rng = Random(seed)
    cache = a_cache(ids=4)
    engine: dict[int, str] = {}
    known: set[int] = set()
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 6)))
        tenant = rng.choice(["t", "u"])
        if rng.random() < 0.2:
            evicted = cache.shrink(rng.randint(0, 12) * BLOCK)
            kept = Kept(evicted)
        else:
            hit = cache.match(a_prefix(text, tenant))
            if hit is not None:
                assert engine[hit.seq].startswith(tenant + text[: hit.blocks])
            kept = cache.keep(a_prefix(text, tenant), room_cells=rng.randint(0, 12) * BLOCK)
        for seq in kept.evicted:
            del engine[seq]
        if kept.seq is not None:
            if kept.base is not None:
                assert kept.seq not in engine
                engine[kept.seq] = engine[kept.base][: kept.start + 1]
            held = engine.get(kept.seq, tenant)
            assert held == tenant + text[: kept.start]
            engine[kept.seq] = held + text[kept.start : kept.end]
        cache.check()
        blocks = {path[:n] for path in engine.values() for n in range(2, len(path) + 1)}
        assert cache.cells == len(blocks) * BLOCK
        stored, removed = cache.changes()
        assert not known & set(stored)
        assert known >= set(removed)
        known = (known | set(stored)) - set(removed)
        assert len(known) == len(blocks)


def test_what_is_pinned_outlives_what_was_used_since() -> None:
    cache = a_cache()
    keep(cache, "ab")
    assert cache.pin("t1", a_prefix("abc")) == 2
    keep(cache, "xy")
    assert cache.match(a_prefix("xy")) == Hit(11, 2)
    assert cache.shrink(2 * BLOCK) == (11,)
    assert cache.pinned("t1") == Hit(10, 2)
    assert keep(cache, "uvw", room_blocks=3) == Kept((), 11, None, 0, 1)
    cache.unpin("t1")
    cache.unpin("t1")
    assert cache.pinned("t1") is None
    assert cache.shrink(BLOCK) == (10,)


def test_no_room_is_made_for_new_paths_out_of_pinned_ones() -> None:
    cache = a_cache(1)
    keep(cache, "ab")
    cache.pin("t1", a_prefix("ab"))
    assert keep(cache, "xy") == Kept()
    assert keep(cache, "abc") == Kept(seq=10, start=2, end=3)
    assert cache.pinned("t1") == Hit(10, 2)


def test_live_sequences_and_a_forgotten_tenant_take_what_is_pinned() -> None:
    cache = a_cache()
    keep(cache, "abcd")
    cache.pin("t1", a_prefix("ab"))
    assert cache.shrink(2 * BLOCK) == (10,)
    assert cache.pinned("t1") is None
    keep(cache, "ab")
    assert cache.pinned("t1") == Hit(10, 2), "the same KV is as good"
    assert cache.forget("t") == (10,)
    assert cache.pinned("t1") is None


def test_nothing_is_pinned_of_what_is_not_there_or_is_anothers() -> None:
    cache = a_cache()
    keep(cache, "ab")
    assert cache.pin("t1", a_prefix("xy")) == 0
    assert cache.pin("t1", a_prefix("ab", "other")) == 0
    assert cache.pinned("t1") is None


def test_one_path_stays_for_a_beginning_that_two_share() -> None:
    cache = a_cache()
    keep(cache, "abx")
    keep(cache, "aby")
    cache.pin("t1", a_prefix("ab"))
    assert len(cache.shrink(3 * BLOCK)) == 1
    assert cache.pinned("t1") is not None
