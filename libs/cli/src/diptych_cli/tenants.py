"""`diptych tenants`: what all keys of a tenant may take together, and the end of one."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec

from diptych_bus.port import Bus
from diptych_cli import credentials
from diptych_cli.auditing import audited
from diptych_cli.failing import CliError
from diptych_cli.identities import (
    checked_tenant,
    entries,
    keys_bucket,
    limits_text,
    on_bus,
    print_json,
)
from diptych_cli.joining import signing
from diptych_cli.purging import Patience, Purged
from diptych_cli.purging import purge as purged
from diptych_cli.tables import blank, console
from diptych_cli.tenant_data import TenantData, survey
from diptych_contracts.audit import Action
from diptych_contracts.errors import Conflict
from diptych_contracts.keys import ApiKey, RateLimits, Tenant, tenant_entry

COLUMNS = ("tenant", "keys", "limits", "state")
PATIENCE = Patience()


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
        async with audited(bus, Action.TENANTS_LIMIT, f"tenant:{name}") as doing:
            doing.detail = f"limits: {limits_text(limits)}"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Purging:
    """What is wanted of a purge."""

    tenant: str
    sure: bool
    keep_usage: bool = False


def purge(url: str, wanted: Purging, *, as_json: bool) -> int:
    """`diptych tenants purge`: deletes everything, or (unless `sure`) counts it.

    The exit code is 1 if nothing was deleted, or something should be gone and is not.
    """
    name = checked_tenant(wanted.tenant)
    outcomes: list[Purged] = []

    async def work(bus: Bus) -> None:
        if not wanted.sure:
            _tell_counted(name, await survey(bus, name), as_json=as_json)
            return
        async with audited(bus, Action.TENANTS_PURGE, f"tenant:{name}") as doing:
            sign = signing(bus, credentials.access(url))
            done = await purged(
                bus, name, keep_usage=wanted.keep_usage, sign=sign, patience=PATIENCE
            )
            outcomes.append(done)
            total = sum(done.deleted.values())
            doing.detail = "; ".join([f"{total} things deleted", *done.unfinished])
        _tell_purged(name, done, as_json=as_json)

    on_bus(url, work)
    return 0 if outcomes and not outcomes[0].unfinished else 1


def _tell_counted(name: str, found: TenantData, *, as_json: bool) -> None:
    counts = {what: count for what, count in found.counts.items() if count}
    if as_json:
        print_json({"tenant": name, "would_delete": counts})
        return
    if not counts:
        print(f"There is nothing of tenant '{name}': see diptych tenants list.")
        return
    _tell_counts(counts)
    print(f"Nothing was deleted: diptych tenants purge {name} --yes does, and cannot be undone.")


def _tell_purged(name: str, done: Purged, *, as_json: bool) -> None:
    if as_json:
        print_json({"tenant": name, **asdict(done)})
        return
    _tell_counts(done.deleted)
    print(f"tenant '{name}' is purged; its keys count nowhere, and new ones cannot be made")
    for title, lines in (("remains", done.remains), ("NOT DONE", done.unfinished)):
        for line in lines:
            print(f"{title}: {line}")


def _tell_counts(counts: Mapping[str, int]) -> None:
    table = blank("what", "count", right=("count",))
    for what, count in counts.items():
        table.add_row(what, str(count))
    if counts:
        console().print(table)


def _limits(limits: RateLimits) -> dict[str, int]:
    known = {name: getattr(limits, name) for name in RateLimits.__struct_fields__}
    return {name: value for name, value in known.items() if value is not None}
