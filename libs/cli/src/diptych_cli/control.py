"""The supervisor's ear: `Scale` orders from the bus become events, and are answered when done."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from diptych_chassis.orders import Believing, Obeying, Refused
from diptych_cli.orders import TellScaled, Wanted
from diptych_cli.stack import SCALABLE
from diptych_contracts.control import Scale, ScaleAnswer, ScaleDone, ScaleRefused

_BY_SERVICE = {kind.service: kind for kind in SCALABLE.values()}


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


class Control:
    """Orders in work, by service.

    Args:
        tell: Where events go.
        subject: Where orders come.
        trust: Verifies who gives them; None: on a bus where nobody has an identity.
    """

    def __init__(
        self, tell: Callable[[Wanted], None], *, subject: str, trust: Believing | None
    ) -> None:
        self._tell = tell
        self._obeying = Obeying(subject, Scale, unix_ms=_unix_ms, trust=trust)
        self._waiting: dict[str, list[asyncio.Future[ScaleAnswer]]] = defaultdict(list)
        self._stopping = False

    async def answer(self, data: bytes) -> ScaleAnswer:
        """Do what a message asks, and say so once it is done."""
        try:
            order: Scale = self._obeying.order(data)
        except Refused as err:
            return ScaleRefused(service="", reason=str(err))
        if reason := self._obstacle(order):
            return ScaleRefused(service=order.service, reason=reason)
        done: asyncio.Future[ScaleAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[order.service].append(done)
        self._tell(Wanted(order.service, order.count))
        return await done

    def _obstacle(self, order: Scale) -> str:
        kind = _BY_SERVICE.get(order.service)
        if kind is None:
            return f"{order.service!r} cannot be scaled; expected one of {', '.join(_BY_SERVICE)}"
        if not kind.least <= order.count <= kind.most:
            return f"expected {kind.least} to {kind.most} of {order.service}, got {order.count}"
        return "the stack is stopping" if self._stopping else ""

    def scaled(self, told: TellScaled) -> None:
        """A service has become as it is wanted."""
        answer = ScaleDone(service=told.service, running=told.running, given_up=told.given_up)
        self._settle(told.service, answer)

    def stop(self) -> None:
        """The stack ends: nothing will be done any more."""
        self._stopping = True
        for service in list(self._waiting):
            self._settle(service, ScaleRefused(service=service, reason="the stack is stopping"))

    def _settle(self, service: str, answer: ScaleAnswer) -> None:
        for done in self._waiting.pop(service, ()):
            if not done.done():
                done.set_result(answer)
