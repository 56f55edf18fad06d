import asyncio
import contextlib
import time
from contextvars import copy_context

import pytest

from diptych_testkit.virtual_time import BEGIN_S, LIFE, Deadlock, run_virtually, virtual_loop


def test_an_hour_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began_s = time.monotonic()
    assert run_virtually(main()) == BEGIN_S + 3600
    assert time.monotonic() - began_s < 60


def test_timers_come_in_their_order_and_timeouts_end_what_waits() -> None:
    async def main() -> list[str]:
        said: list[str] = []

        async def say(word: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            said.append(word)

        async with asyncio.TaskGroup() as tasks:
            for word, after_s in (("c", 0.3), ("a", 0.1), ("b", 0.2)):
                tasks.create_task(say(word, after_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
            said.append("never")
        return said

    assert run_virtually(main()) == ["a", "b", "c"]


def test_a_life_that_is_held_does_nothing_until_it_is_let_go() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = virtual_loop()
        assert loop is not None
        seen: list[tuple[str, float]] = []

        async def tick(name: str) -> None:
            while True:
                seen.append((name, loop.time() - BEGIN_S))
                await asyncio.sleep(1)

        context = copy_context()
        context.run(LIFE.set, "frozen")
        ticking = [
            asyncio.create_task(tick("frozen"), context=context),
            asyncio.create_task(tick("other")),
        ]
        await asyncio.sleep(0.5)
        loop.hold("frozen")
        await asyncio.sleep(2)
        loop.let_go("frozen")
        await asyncio.sleep(0.1)
        for task in ticking:
            task.cancel()
        return seen

    assert run_virtually(main()) == [
        ("frozen", 0.0),
        ("other", 0.0),
        ("other", 1.0),
        ("other", 2.0),
        ("frozen", 2.5),
    ]


def test_a_life_ends_however_often_it_shields_itself() -> None:
    async def main() -> bool:
        loop = virtual_loop()
        assert loop is not None

        async def stubborn() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.shield(asyncio.create_task(asyncio.Event().wait()))

        context = copy_context()
        context.run(LIFE.set, "stubborn")
        task = asyncio.create_task(stubborn(), context=context)
        await asyncio.sleep(1)
        await loop.end("stubborn", first=asyncio.sleep(0))
        return task.cancelled() and len(asyncio.all_tasks()) == 1

    assert run_virtually(main())


def test_what_goes_to_a_thread_is_done_in_the_loop() -> None:
    async def main() -> float:
        return await asyncio.to_thread(asyncio.get_running_loop().time)

    assert run_virtually(main()) == BEGIN_S


def test_tasks_in_a_set_have_an_order_of_their_own() -> None:
    async def main() -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(0), name=f"{n}") for n in range(50)}
        await asyncio.wait(tasks)
        return [task.get_name() for task in tasks]

    assert run_virtually(main()) == run_virtually(main())


def test_waiting_for_nothing_is_an_error_rather_than_for_ever() -> None:
    with pytest.raises(Deadlock):
        run_virtually(asyncio.Event().wait())
