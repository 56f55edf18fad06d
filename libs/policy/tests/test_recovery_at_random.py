"""Two or more ledgers under random events; the rules of `World` hold after each of them."""

from collections import Counter

import pytest

from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState
from diptych_testkit.rough_world import RoughWorld

SEEDS = 60
STEPS = 600


def run(seed: int) -> RoughWorld:
    world = RoughWorld(seed, trouble_frac=0.02 if seed % 2 else 0.1)
    for _ in range(STEPS):
        world.step()
    world.heal()
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_request_ends_once_whatever_happens(seed: int) -> None:
    world = run(seed)
    world.check_outcome()
    assert {record.state for record, _ in world.bucket.values()} == {RecordState.CLOSED}


def test_the_world_is_as_rough_as_it_should_be() -> None:
    """All kinds of ends are met, and attempts are lost."""
    reasons: Counter[EndReason] = Counter()
    attempts = forged = 0
    for seed in range(SEEDS, SEEDS + 20):
        world = run(seed)
        attempts += world.fences()
        forged += world.refused()
        for record, _ in world.bucket.values():
            assert record.end is not None
            reasons[record.end.reason] += 1
    assert attempts > 40
    assert forged > 10
    assert reasons[EndReason.LENGTH] > 20
    assert reasons[EndReason.CANCELLED] > 0
