"""`diptych usage`: what tenants used, per day; days are UTC."""

from datetime import date
from typing import Any, cast

from diptych_bus.port import Bus
from diptych_cli.failing import CliError
from diptych_cli.identities import listed, on_bus, print_json
from diptych_cli.tables import blank, console
from diptych_contracts.streams import USAGE
from diptych_contracts.usage import UsageDay, UsageEntry, Used
from diptych_policy.usage import amounts_of, total

COLUMNS = (
    *("day", "tenant", "requests", "prompt", "cached", "answer"),
    *("KV token·s", "prefill J", "decode J", "energy"),
)


def usage(url: str, *, tenant: str | None, since: str | None, as_json: bool) -> int:
    """Every day of `tenant` (all, if None) from `since` on, and their sum."""
    first = _checked_day(since)

    async def work(bus: Bus) -> None:
        days = [
            day
            for day in await _days(bus)
            if tenant in (None, day.tenant) and (first is None or day.day >= first)
        ]
        if as_json:
            print_json([{"day": d.day, "tenant": d.tenant, **amounts_of(d.used)} for d in days])
        elif days:
            table = blank(*COLUMNS, right=COLUMNS[2:-1])
            for day in days:
                table.add_row(day.day, day.tenant, *_cells(day.used))
            if len(days) > 1:
                table.add_row("total", "", *_cells(total(day.used for day in days)))
            console().print(table)
        else:
            print("nothing was used, or not yet summed: gateways do that every two seconds")

    return on_bus(url, work)


async def _days(bus: Bus) -> list[UsageDay]:
    bucket = bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry)))
    found = {kept.key: kept.value for kept in await listed(bucket)}
    days = [(key, value) for key, value in found.items() if isinstance(value, UsageDay)]
    return [day for _, day in sorted(days, key=lambda pair: pair[0])]


def _checked_day(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as err:
        raise CliError(f"--since: expected a day as 2026-01-31, got {text!r}", code=2) from err


def _cells(used: Used) -> list[str]:
    told = {name: value for name, value in amounts_of(used).items() if name != "sim_j"}
    cells = [f"{n:.1f}" if isinstance(n, float) else str(n) for n in told.values()]
    return [*cells, energy(used)]


def energy(used: Used) -> str:
    """Whether joules were measured."""
    joules = used.prefill_j + used.decode_j
    if not joules:
        return ""
    if not used.sim_j:
        return "measured"
    return "simulated" if used.sim_j >= 0.999 * joules else f"{used.sim_j:.1f} J simulated"
