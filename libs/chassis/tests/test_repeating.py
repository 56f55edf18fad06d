import asyncio

import pytest

from diptych_chassis import repeating
from diptych_contracts.errors import BusAway


class Time:
    """A clock that only sleeping and working move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(repeating.asyncio, "sleep", self.sleep)

    async def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s

    def __call__(self) -> float:
        return self.now_s


class Done(Exception):
    pass


async def test_turns_keep_their_beat_and_missed_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Time(monkeypatch)
    turns: list[float] = []
    work_s = iter([0.2, 0.0, 2.5, 0.0, 0.0])

    async def act() -> None:
        turns.append(clock.now_s)
        try:
            clock.now_s += next(work_s)
        except StopIteration as err:
            raise Done from err

    with pytest.raises(Done):
        await repeating.every(1.0, act, now_s=clock)
    assert turns == [0.0, 1.0, 2.0, 4.5, 5.5, 6.5]


async def test_a_transient_failure_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time(monkeypatch)
    outcomes = iter([BusAway("away"), None, Done()])

    async def act() -> None:
        if outcome := next(outcomes):
            raise outcome

    with pytest.raises(Done):
        await repeating.every(1.0, act, now_s=clock)
    assert clock.now_s == 2.0


async def test_cancelling_ends_it() -> None:
    async def act() -> None:
        pass

    task = asyncio.create_task(repeating.every(60.0, act))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
