import pytest

from diptych_contracts.tiers import TierKey
from diptych_kvtiers.orders import Orders
from diptych_kvtiers.patience import LONGEST_PAUSE_S, Patience
from diptych_kvtiers.shelf import Shelf
from diptych_kvtiers.speed import Speed
from diptych_testkit.tier_suite import tier_key


def test_a_tier_that_failed_is_left_alone_for_a_while_that_grows() -> None:
    patience = Patience()
    assert patience.allows(0.0)
    now_s, pauses = 0.0, []
    for _ in range(9):
        patience.failed(now_s, "gone")
        pause_s = next(n / 2 for n in range(1000) if patience.allows(now_s + n / 2))
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    patience.answered()
    assert patience.allows(now_s)
    patience.failed(now_s, "gone")
    assert patience.allows(now_s + 1), "it begins anew after an answer"


def test_one_caller_tries_while_the_others_leave_it_alone() -> None:
    patience = Patience()
    patience.failed(0.0, "gone")
    assert [patience.allows(1.5) for _ in range(3)] == [True, False, False]
    assert patience.allows(3.0), "whoever tried is lost: another one may"


def test_calls_that_fail_together_count_once() -> None:
    patience = Patience()
    for _ in range(20):
        patience.failed(0.0, "gone")
    assert patience.allows(1.0)


def test_calls_beside_one_another_are_not_measured_twice() -> None:
    speed = Speed(1000.0)
    assert speed.bytes_per_s == 1000
    for _ in range(4):
        speed.began(0.0)
    for _ in range(4):
        speed.ended(1.0, 1000)
    assert speed.bytes_per_s == pytest.approx(4100 / 1.1)


def test_misses_do_not_make_a_tier_slow() -> None:
    speed = Speed(1000.0)
    for second in range(100):
        speed.began(float(second))
        speed.ended(second + 0.9, 0)
    assert speed.bytes_per_s == 1000


def test_old_measurements_fade() -> None:
    speed = Speed(1e9)
    for second in range(100):
        speed.began(float(second))
        speed.ended(second + 1.0, 1000)
    assert speed.bytes_per_s < 2000


def test_time_between_calls_is_not_measured() -> None:
    speed = Speed(1000.0)
    for second in (0.0, 500.0):
        speed.began(second)
        speed.ended(second + 1.0, 1000)
    assert speed.bytes_per_s == pytest.approx(2100 / 2.1)


def test_the_least_recently_used_gives_way() -> None:
    shelf = Shelf(30)
    for n in range(3):
        assert shelf.add(tier_key(n), 10) == []
    shelf.touch(tier_key(0))
    assert shelf.add(tier_key(3), 15) == [tier_key(1), tier_key(2)]
    assert (list(shelf), shelf.n_bytes) == ([tier_key(0), tier_key(3)], 25)
    assert shelf.add(tier_key(3), 5) == []
    assert shelf.n_bytes == 15
    assert shelf.make_room(1) == [tier_key(0)]
    assert shelf.make_room(1000) == [tier_key(3)]
    assert (len(shelf), shelf.n_bytes) == (0, 0)


def test_what_is_added_stays_even_beyond_the_budget() -> None:
    shelf = Shelf(10)
    shelf.add(tier_key(0), 5)
    assert not shelf.fits(11)
    assert shelf.add(tier_key(1), 11) == [tier_key(0)]
    assert list(shelf) == [tier_key(1)]


def test_a_tenant_goes_as_a_whole() -> None:
    shelf = Shelf(1000)
    for n in range(3):
        shelf.add(tier_key(n), 10)
    shelf.add(tier_key(0, "other"), 10)
    assert set(shelf.remove_tenant(tier_key(0).tenant_tag)) == {tier_key(n) for n in range(3)}
    assert shelf.remove_tenant(tier_key(0).tenant_tag) == []
    assert (list(shelf), shelf.n_bytes) == ([tier_key(0, "other")], 10)


def test_what_was_under_way_when_a_tenant_was_forgotten_is_over() -> None:
    orders = Orders()
    began = orders.count
    assert not orders.is_over("acme", began)
    orders.give("acme")
    assert orders.is_over("acme", began)
    assert not orders.is_over("other", began)
    assert not orders.is_over("acme", orders.count)


@pytest.mark.parametrize(
    ("tenant_tag", "block"),
    [
        ("", ""),
        ("a" * 31, "b" * 64),
        ("a" * 32, "b" * 65),
        ("A" * 32, "b" * 64),
        ("a" * 32, "../" + "b" * 61),
        ("a" * 31 + "\u0661", "b" * 64),
        ("a" * 31 + "\n", "b" * 64),
    ],
)
def test_a_key_is_hexadecimal(tenant_tag: str, block: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal digits"):
        TierKey(tenant_tag, block)
