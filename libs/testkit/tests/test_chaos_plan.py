from collections import Counter
from itertools import islice

import pytest

from diptych_testkit.chaos.asking import Api, Leaving, asks, catalogue
from diptych_testkit.chaos.options import parse
from diptych_testkit.chaos.plan import Kind, Target, make_plan, names


def test_the_same_seed_gives_the_same_plan() -> None:
    assert make_plan(7, minutes=10) == make_plan(7, minutes=10)
    assert make_plan(7, minutes=10) != make_plan(8, minutes=10)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_hold_sixty_faults_of_every_kind_in_order(seed: int) -> None:
    plan = make_plan(seed, minutes=10)
    assert len(plan) == 60
    times = [fault.at_s for fault in plan]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 600
    counts = Counter(fault.name for fault in plan)
    assert set(counts) == set(names())
    assert max(counts.values()) - min(counts.values()) <= 1


def test_every_service_and_nats_is_killed_and_frozen() -> None:
    struck = {(fault.kind, fault.target) for fault in make_plan(1, minutes=10)}
    for target in Target:
        if target is not Target.MACHINE:
            assert {(Kind.KILL, target), (Kind.FREEZE, target)} <= struck


def test_a_short_run_has_as_many_faults_as_were_asked_for() -> None:
    plan = make_plan(1, minutes=0.5, faults=4)
    assert [fault.number for fault in plan] == [0, 1, 2, 3]
    assert plan[-1].at_s < 30


def test_a_slot_asks_the_same_again_and_slots_differ() -> None:
    def some(seed: int, slot: int) -> list[object]:
        return list(islice(asks(seed, slot, 16), 20))

    assert some(1, 0) == some(1, 0)
    assert some(1, 0) != some(1, 1)
    assert some(1, 0) != some(2, 0)


def test_requests_are_of_every_kind() -> None:
    many = [ask for slot in range(16) for ask in islice(asks(3, slot, 16), 40)]
    assert {ask.api for ask in many} == set(Api)
    assert {ask.leaving for ask in many} == set(Leaving)
    assert {ask.prompt for ask in many} == set(range(16))
    assert all(ask.resume for ask in many if ask.api is Api.RESPONSES)
    assert {ask.resume for ask in many if ask.api is Api.CHAT} == {True, False}
    assert all(ask.api is Api.RESPONSES for ask in many if ask.leaving is Leaving.CANCEL)
    temperatures = {prompt.sampling.temperature for prompt in catalogue()}
    assert temperatures == {0.0, 0.8}
    lengths = sorted(len(prompt.text) for prompt in catalogue())
    assert lengths[-1] > 10 * lengths[0]


def test_a_seed_can_be_given_and_is_drawn_otherwise() -> None:
    assert parse(["--seed", "5", "--minutes", "2"]).seed == 5
    assert parse([]).minutes == 10
    assert parse([]).seed != parse([]).seed
