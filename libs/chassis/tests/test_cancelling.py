import asyncio

import pytest

from diptych_chassis.cancelling import cancellable, end


async def deaf(times: int) -> str:
    """Swallows the first `times` cancellations."""
    for _ in range(times):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(60)
    return "never"


async def test_a_deaf_task_is_ended() -> None:
    task = asyncio.create_task(deaf(2))
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()


async def test_a_task_that_fails_on_its_way_out_is_ended() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise KeyError("x")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await end(task)
    assert task.done()


async def test_a_cancellation_reaches_deaf_work() -> None:
    task = asyncio.create_task(cancellable(deaf(2)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


async def test_results_and_errors_come_through() -> None:
    async def fails() -> None:
        raise KeyError("x")

    assert await cancellable(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(KeyError):
        await cancellable(fails())
