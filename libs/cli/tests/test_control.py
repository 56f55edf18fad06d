import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from diptych_chassis.orders import Orders
from diptych_cli.control import Control
from diptych_cli.orders import TellScaled, Wanted
from diptych_contracts.control import Scale, ScaleDone, ScaleRefused
from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import encode

SUBJECT = "control.supervisor-1"


def control_of(tell: Callable[[Wanted], None]) -> Control:
    return Control(tell, subject=SUBJECT, trust=None)


def order(count: int = 3, service: str = "decode-worker", **said: Any) -> bytes:
    sent = {"subject": SUBJECT, "role": "operator", "epoch": time.time_ns()} | said
    orders = Orders(
        Incarnation("operator"),
        sent["role"],
        unix_ms=lambda: time.time_ns() // 10**6,
        identity=None,
    )
    body = Scale(service=service, count=count)
    return encode(orders.signed(sent["subject"], body, epoch=sent["epoch"], valid_ms=30_000))


async def test_an_order_is_answered_once_it_is_so() -> None:
    told: list[Wanted] = []
    control = control_of(told.append)
    first, again = (asyncio.create_task(control.answer(order())) for _ in range(2))
    await asyncio.sleep(0)
    assert told == [Wanted("decode-worker", 3)] * 2
    assert not first.done()
    control.scaled(TellScaled("decode-worker", ("a", "b", "c"), 0))
    done = ScaleDone(service="decode-worker", running=("a", "b", "c"))
    assert (await first, await again) == (done, done)


async def test_what_is_so_already_is_answered_at_once() -> None:
    control = control_of(lambda wanted: control.scaled(TellScaled(wanted.service, ("a",), 0)))
    assert await control.answer(order(1)) == ScaleDone(service="decode-worker", running=("a",))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: order(0), "expected 1 to 64 of decode-worker, got 0"),
        (lambda: order(65), "expected 1 to 64 of decode-worker, got 65"),
        (lambda: order(2, "nats"), "'nats' cannot be scaled; expected one of prefill-worker"),
        (lambda: b"meow", "this order is not obeyed (unreadable)"),
        (
            lambda: encode(Scale(service="decode-worker", count=2)),
            "this order is not obeyed (unsigned)",
        ),
        (lambda: order(2, role="decode-worker"), "this order is not obeyed (forbidden)"),
        (lambda: order(2, subject="control.supervisor-2"), "this order is not obeyed (foreign)"),
    ],
)
async def test_what_cannot_be_is_refused(made: Callable[[], bytes], reason: str) -> None:
    answer = await control_of(lambda _: None).answer(made())
    assert isinstance(answer, ScaleRefused)
    assert answer.reason.startswith(reason)


async def test_an_order_is_obeyed_once() -> None:
    """Whoever recorded it cannot have it done again; the same by a new command is another order."""
    control = control_of(lambda wanted: control.scaled(TellScaled(wanted.service, ("a",), 0)))
    data = order(1)
    done = ScaleDone(service="decode-worker", running=("a",))
    assert await control.answer(data) == done
    again = await control.answer(data)
    assert isinstance(again, ScaleRefused)
    assert again.reason.startswith("this order is not obeyed (replayed)")
    assert await control.answer(order(1)) == done


async def test_none_of_the_prefill_workers_may_be_left() -> None:
    control = control_of(lambda wanted: control.scaled(TellScaled(wanted.service, (), 0)))
    assert await control.answer(order(0, "prefill-worker")) == ScaleDone(service="prefill-worker")


async def test_a_stack_that_stops_says_so() -> None:
    control = control_of(lambda _: None)
    waiting = asyncio.create_task(control.answer(order()))
    await asyncio.sleep(0)
    control.stop()
    expected = ScaleRefused(service="decode-worker", reason="the stack is stopping")
    assert (await waiting, await control.answer(order())) == (expected, expected)
