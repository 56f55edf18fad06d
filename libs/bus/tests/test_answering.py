import asyncio

import pytest

from diptych_bus.answering import MAX_ANSWERS, Answers
from diptych_bus.lifetime import Lifetime, heeding, stop, within, woken
from diptych_bus.port import Delivery
from diptych_contracts.errors import Transient
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation

BEAT = Beat(member=Incarnation("w"), service="s", count=1)


async def keep(replies: list[bytes], data: bytes) -> None:
    replies.append(data)


async def test_more_requests_than_can_be_in_work_are_dropped() -> None:
    gate = asyncio.Event()
    replies: list[bytes] = []

    async def answer(_: Delivery) -> Beat:
        await gate.wait()
        return BEAT

    answers = Answers(answer, Lifetime())
    for _ in range(MAX_ANSWERS + 5):
        answers.take(Delivery("job.w", b""), lambda data: keep(replies, data))
    gate.set()
    for _ in range(5):
        await asyncio.sleep(0)

    assert len(replies) == MAX_ANSWERS


async def test_close_cancels_what_is_in_work() -> None:
    cancelled = asyncio.Event()

    async def answer(_: Delivery) -> Beat:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return BEAT

    answers = Answers(answer, Lifetime())
    answers.take(Delivery("job.w", b""), lambda data: keep([], data))
    await asyncio.sleep(0)
    await answers.close()

    assert cancelled.is_set()


@pytest.mark.parametrize(("error", "ends"), [(Transient("x"), False), (KeyError("x"), True)])
async def test_only_a_bug_ends_the_bus(error: Exception, ends: bool) -> None:
    lifetime = Lifetime()

    async def answer(_: Delivery) -> Beat:
        raise error

    Answers(answer, lifetime).take(Delivery("job.w", b""), lambda data: keep([], data))
    for _ in range(20):
        await asyncio.sleep(0)

    assert lifetime.closed.done() is ends


async def test_a_failed_task_ends_the_bus() -> None:
    lifetime = Lifetime()

    async def work() -> None:
        raise KeyError("x")

    lifetime.start(work(), "work")

    assert isinstance(await asyncio.wait_for(lifetime.closed, 60), KeyError)


async def test_woken_resets_the_event_and_gives_up() -> None:
    wake = asyncio.Event()
    wake.set()

    await woken(wake, 5.0)
    assert not wake.is_set()
    await woken(wake, 0.01)


async def test_a_swallowed_cancellation_is_heeded() -> None:
    """`wait_for` of Python 3.11 gives the result that arrives together with a cancellation."""
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    went_on = False

    async def work() -> None:
        nonlocal went_on
        await heeding(asyncio.wait_for(answer, 5.0))
        went_on = True

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(1)
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()
    assert not went_on


async def test_a_cancellation_swallowed_by_a_failure_is_heeded() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(heeding(asyncio.wait_for(answer, 5.0)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_exception(OSError("refused"))
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()


async def test_work_that_swallows_its_cancellation_ends_in_time() -> None:
    """As nats-py's connecting: it tries again after any failure, `wait_for` hides the end."""
    tries = 0

    async def connecting() -> None:
        nonlocal tries
        while True:
            tries += 1
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if tries > 2:
                    raise

    with pytest.raises(TimeoutError):
        await within(0.01, connecting())

    assert tries == 3


async def test_work_that_is_done_in_time_says_how() -> None:
    async def failing() -> None:
        raise KeyError("a")

    assert await within(60.0, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(KeyError):
        await within(60.0, failing())


async def test_stop_insists() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1

    task = asyncio.ensure_future(stubborn())
    await asyncio.sleep(0)
    await stop(task)

    assert task.done()
    assert swallowed == 2
