"""`diptych tenants`: what all keys of a tenant may take together."""

import time

import msgspec

from diptych_bus.port import Bus
from diptych_cli.failing import CliError
from diptych_cli.identities import (
    checked_tenant,
    entries,
    keys_bucket,
    limits_text,
    on_bus,
    print_json,
)
from diptych_cli.tables import blank, console
from diptych_contracts.errors import Conflict
from diptych_contracts.keys import ApiKey, RateLimits, Tenant, tenant_entry

COLUMNS = ("tenant", "keys", "limits", "state")


def show_all(url: str, *, as_json: bool) -> int:
    """`diptych tenants list`: all that have a key or a record."""

    async def work(bus: Bus) -> None:
        found = await entries(bus)
        records = {entry.tenant: entry for entry in found if isinstance(entry, Tenant)}
        rows = []
        for name in sorted({entry.tenant for entry in found}):
            record = records.get(name, Tenant(tenant=name, created_unix_ms=0))
            keys = sum(isinstance(entry, ApiKey) and entry.tenant == name for entry in found)
            state = "purged" if record.purged_unix_ms else "active"
            rows.append((record, keys, state))
        if as_json:
            print_json(
                [
                    {
                        "tenant": record.tenant,
                        "keys": keys,
                        "limits": _limits(record.limits),
                        "state": state,
                    }
                    for record, keys, state in rows
                ]
            )
        elif rows:
            table = blank(*COLUMNS, right=("keys",))
            for record, keys, state in rows:
                table.add_row(record.tenant, str(keys), limits_text(record.limits), state)
            console().print(table)
        else:
            print("no tenants: without keys everybody is tenant 'default'")

    return on_bus(url, work)


def limit(url: str, tenant: str, limits: RateLimits) -> int:
    """`diptych tenants limit`: sets all three; those that are not named are not limited."""
    name = checked_tenant(tenant)

    async def work(bus: Bus) -> None:
        bucket = keys_bucket(bus)
        kept = await bucket.get(tenant_entry(name))
        now_unix_ms = time.time_ns() // 1_000_000
        fresh = Tenant(tenant=name, created_unix_ms=now_unix_ms, limits=limits)
        try:
            if kept is None:
                await bucket.create(tenant_entry(name), fresh)
            else:
                assert isinstance(kept.value, Tenant)
                changed = msgspec.structs.replace(kept.value, limits=limits)
                await bucket.update(kept.key, changed, kept.revision)
        except Conflict as err:
            raise CliError(f"somebody else is changing tenant '{name}': try again") from err
        print(f"tenant '{name}': limits of all its keys together: {limits_text(limits)}")

    return on_bus(url, work)


def _limits(limits: RateLimits) -> dict[str, int]:
    known = {name: getattr(limits, name) for name in RateLimits.__struct_fields__}
    return {name: value for name, value in known.items() if value is not None}
