"""What a command does to the fleet is written down: before it is tried, and how it ended.

A command that cannot write that down does nothing.
"""

import getpass
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from diptych_bus.port import Bus
from diptych_cli.failing import CliError
from diptych_contracts import subjects
from diptych_contracts.audit import Action, Audited, Outcome
from diptych_contracts.errors import DiptychError, Transient

_STORE_S = 5.0
_MAX_DETAIL_CHARS = 300


@dataclass(slots=True)
class Doing:
    """An action on its way: what is known of it by now."""

    audit_id: str
    object: str
    detail: str = ""


@asynccontextmanager
async def audited(bus: Bus, action: Action, object_name: str = "") -> AsyncIterator[Doing]:
    """Inside the `with` the action is done; `Doing` takes what came of it.

    Raises:
        CliError: it could not be written down before, and was not tried; or not afterwards.
    """
    doing = Doing(secrets.token_hex(8), object_name)
    try:
        await _write(bus, action, doing, Outcome.ASKED)
    except Transient as err:
        raise CliError(f"nothing was done: it cannot be written into the audit ({err})") from err
    try:
        yield doing
    except BaseException as err:
        said = str(err) if isinstance(err, (CliError, DiptychError)) else type(err).__name__
        doing.detail = "; ".join(filter(None, (doing.detail, said)))
        await _write(bus, action, doing, Outcome.FAILED)
        raise
    try:
        await _write(bus, action, doing, Outcome.DONE)
    except Transient as err:
        raise CliError(f"it is done, and the audit says only that it was tried ({err})") from err


async def _write(bus: Bus, action: Action, doing: Doing, outcome: Outcome) -> None:
    entry = Audited(
        audit_id=doing.audit_id,
        action=action,
        actor=who(),
        door="cli",
        object=doing.object,
        outcome=outcome,
        detail=doing.detail[:_MAX_DETAIL_CHARS],
        unix_ms=time.time_ns() // 1_000_000,
    )
    msg_id = f"{doing.audit_id}.{outcome}"
    await bus.store(subjects.audit(action), entry, msg_id=msg_id, timeout_s=_STORE_S)


def who() -> str:
    """The user and host of this command."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
