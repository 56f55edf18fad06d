"""A command's connection to the bus of a running stack."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from diptych_bus.access import Access
from diptych_bus.jetstream import JetStreamBus
from diptych_cli import credentials
from diptych_cli.failing import CliError
from diptych_contracts.errors import Transient

_WAIT_S = 3.0


@asynccontextmanager
async def joined(url: str, me: Access | None = None) -> AsyncIterator[JetStreamBus]:
    """The bus at `url`, inside the `with`; as `me`, or as `credentials` say.

    Raises:
        CliError: nobody answers there, or nothing says who this is.
    """
    me = me or credentials.access(url)
    # What goes wrong is told by the command, not by a log.
    logging.getLogger("diptych.bus").setLevel(logging.CRITICAL)
    try:
        bus = await JetStreamBus.connect(url, name=me.name, wait_s=_WAIT_S, access=me)
    except Transient as err:
        raise CliError(f"the stack's bus does not answer, is it still starting? {err}") from err
    try:
        yield bus
    finally:
        await bus.close()
