"""`diptych audit`: who did what to the fleet, its keys and its tenants."""

import time
from typing import Any

from diptych_bus.port import Bus
from diptych_cli.identities import as_date, on_bus, print_json, span_s
from diptych_cli.tables import blank, console
from diptych_contracts import subjects
from diptych_contracts.audit import Audited
from diptych_contracts.streams import AUDIT
from diptych_policy.audit import about, folded

COLUMNS = ("time", "actor", "door", "action", "object", "outcome", "detail")


def audit(
    url: str, *, actor: str, action: str, object_name: str, since: str | None, as_json: bool
) -> int:
    """Every action that matches, the newest last."""
    since_unix_ms = 0
    if since is not None:
        since_unix_ms = time.time_ns() // 1_000_000 - round(span_s(since) * 1000)

    async def work(bus: Bus) -> None:
        entries = about(
            folded(await written(bus)),
            actor=actor,
            action=action,
            object_name=object_name,
            since_unix_ms=since_unix_ms,
        )
        if as_json:
            print_json([facts(entry) for entry in entries])
        elif entries:
            table = blank(*COLUMNS)
            for entry in entries:
                table.add_row(*facts(entry).values())
            console().print(table)
        else:
            print("no such action was written down")

    return on_bus(url, work)


async def written(bus: Bus) -> list[Audited]:
    """Every word of stream `AUDIT`, in its order."""
    items = bus.all_stored(AUDIT.name, subject=subjects.AUDITS)
    return [item.delivery.decode(Audited) async for item in items]


def facts(entry: Audited) -> dict[str, Any]:
    """What is told of an action, as `COLUMNS` names it."""
    return {
        "time": as_date(entry.unix_ms),
        "actor": entry.actor,
        "door": entry.door,
        "action": entry.action.value,
        "object": entry.object,
        "outcome": entry.outcome.value,
        "detail": entry.detail,
    }
