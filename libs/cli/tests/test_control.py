import asyncio

import pytest

from diptych_cli.control import Control
from diptych_cli.orders import TellScaled, Wanted
from diptych_contracts.control import Scale, ScaleDone, ScaleRefused
from diptych_contracts.wire import encode


def order(count: int = 3, service: str = "decode-worker") -> bytes:
    return encode(Scale(service=service, count=count))


async def test_an_order_is_answered_once_it_is_so() -> None:
    told: list[Wanted] = []
    control = Control(told.append)
    first, again = (asyncio.create_task(control.answer(order())) for _ in range(2))
    await asyncio.sleep(0)
    assert told == [Wanted("decode-worker", 3)] * 2
    assert not first.done()
    control.scaled(TellScaled("decode-worker", ("a", "b", "c"), 0))
    done = ScaleDone(service="decode-worker", running=("a", "b", "c"))
    assert (await first, await again) == (done, done)


async def test_what_is_so_already_is_answered_at_once() -> None:
    control = Control(lambda wanted: control.scaled(TellScaled(wanted.service, ("a",), 0)))
    assert await control.answer(order(1)) == ScaleDone(service="decode-worker", running=("a",))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (order(0), "expected 1 to 64 of decode-worker, got 0"),
        (order(65), "expected 1 to 64 of decode-worker, got 65"),
        (order(2, "nats"), "'nats' cannot be scaled; expected one of prefill-worker"),
        (b"meow", "expected a Scale message"),
    ],
)
async def test_what_cannot_be_is_refused(data: bytes, reason: str) -> None:
    answer = await Control(lambda _: None).answer(data)
    assert isinstance(answer, ScaleRefused)
    assert answer.reason.startswith(reason)


async def test_none_of_the_prefill_workers_may_be_left() -> None:
    control = Control(lambda wanted: control.scaled(TellScaled(wanted.service, (), 0)))
    assert await control.answer(order(0, "prefill-worker")) == ScaleDone(service="prefill-worker")


async def test_a_stack_that_stops_says_so() -> None:
    control = Control(lambda _: None)
    waiting = asyncio.create_task(control.answer(order()))
    await asyncio.sleep(0)
    control.stop()
    expected = ScaleRefused(service="decode-worker", reason="the stack is stopping")
    assert (await waiting, await control.answer(order())) == (expected, expected)
