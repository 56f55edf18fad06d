"""A command's connection to the bus of a running stack."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from diptych_bus.access import Access
from diptych_bus.jetstream import JetStreamBus
from diptych_bus.port import Bus
from diptych_chassis.orders import Orders
from diptych_cli import credentials
from diptych_cli.failing import CliError
from diptych_contracts.errors import Transient
from diptych_contracts.orders import Signed
from diptych_contracts.wire import Message

_WAIT_S = 10.0
_VALID_MS = 30_000
"""How long an order may take to arrive."""

Sign = Callable[[str, Message], Signed]
"""Makes a message an order to whoever listens on a subject."""


@asynccontextmanager
async def joined(url: str, me: Access | None = None) -> AsyncIterator[JetStreamBus]:
    """The bus at `url`, inside the `with`; as `me`, or as `credentials` say.

    Raises:
        CliError: nobody answers there, or nothing says who this is.
    """
    me = me or credentials.access(url)
    with _quiet():
        try:
            bus = await JetStreamBus.connect(url, name=me.name, wait_s=_WAIT_S, access=me)
        except Transient as err:
            raise CliError(f"the stack's bus does not answer, is it still starting? {err}") from err
        try:
            yield bus
        finally:
            await bus.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """What goes wrong is told by the command, not by a log."""
    log = logging.getLogger("diptych.bus")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def signing(bus: Bus, me: Access) -> Sign:
    """Signs the orders of one command."""
    orders = Orders(me.name, me.role, unix_ms=bus.unix_ms, identity=lambda: me.identity)

    def sign(subject: str, body: Message) -> Signed:
        # The moment of an order is its epoch: the next command is another process.
        return orders.signed(subject, body, epoch=time.time_ns(), valid_ms=_VALID_MS)

    return sign
