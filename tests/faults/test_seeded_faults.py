"""Seeded faults in virtual time: a small fleet's bad days, each with every invariant asserted.

`DIPTYCH_FAULT_SEEDS` says how many seeds per case (20; `make faults`: 200). A failing one is
printed with the command that replays it.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from diptych_testkit.fault_plans import CASES, plan
from diptych_testkit.fault_runs import run_case

SEEDS = int(os.environ.get("DIPTYCH_FAULT_SEEDS", "20"))
BATCH = 20
"""Seeds per test: few enough to be over in seconds, many enough that tests do not cost more."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log lines of twenty seeds would hide which one failed; a replay shows its own."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def batches() -> list[range]:
    return [range(first, min(first + BATCH, SEEDS)) for first in range(0, SEEDS, BATCH)]


@pytest.mark.parametrize("seeds", batches(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
@pytest.mark.parametrize("case", CASES)
def test_whatever_befalls_a_fleet_nothing_is_lost(case: str, seeds: range) -> None:
    failed = [seed for seed in seeds if not holds(case, seed)]
    assert not failed, f"{case}: {failed}; see above how to replay them"


def holds(case: str, seed: int) -> bool:
    try:
        run_case(case, seed)
    except (Exception, BaseExceptionGroup) as err:
        sys.stderr.write(
            f"\nseed {seed} of {case!r} failed: {innermost(err)}\n"
            f"replay: python -m diptych_testkit.fault_runs {case} {seed}\n"
        )
        return False
    return True


def innermost(err: BaseException) -> BaseException:
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    return err


def test_a_seed_gives_the_same_plan_every_time() -> None:
    for case in CASES:
        assert plan(case, 3) == plan(case, 3)
        assert plan(case, 3) != plan(case, 4)


FINGERPRINTS = """
from diptych_testkit.fault_runs import run_case
print(run_case("everything", 1).fingerprint, run_case("lost_gateway", 2).fingerprint)
"""


def test_a_seed_gives_the_same_journal_in_another_process() -> None:
    """Also where strings hash differently: no order hangs on a set."""
    here = [run_case("everything", 1).fingerprint, run_case("lost_gateway", 2).fingerprint]
    assert run_case("everything", 1).fingerprint == here[0]
    for hash_seed in ("1", "2"):
        replayed = subprocess.run(
            [sys.executable, "-c", FINGERPRINTS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert here == replayed.stdout.splitlines()[-1].split()
