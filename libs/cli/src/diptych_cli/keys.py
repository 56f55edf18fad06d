"""`diptych keys`: API keys, made, listed, shown and revoked. A key itself is printed once."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_bus.port import Bus
from diptych_cli.auditing import audited, who
from diptych_cli.failing import CliError
from diptych_cli.identities import (
    as_date,
    checked_tenant,
    entries,
    keys_bucket,
    limits_text,
    on_bus,
    print_json,
)
from diptych_cli.tables import blank, console
from diptych_contracts.audit import Action
from diptych_contracts.errors import Conflict
from diptych_contracts.keys import (
    KEY_PREFIX,
    SHOWN_CHARS,
    ApiKey,
    KeyEntry,
    RateLimits,
    Role,
    Tenant,
    digest,
    key_entry,
)
from diptych_policy.access import Standing, closes, standing

COLUMNS = ("id", "key", "tenant", "name", "role", "created", "expires", "state", "limits")
NOTHING = "no API keys: gateways serve this machine alone, without one"
_ID_BYTES = 6
_SECRET_BYTES = 32
_MAX_NAME_CHARS = 100
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A key to be made."""

    tenant: str
    name: str
    role: Role
    expires_s: float | None
    """From now; None: never."""
    limits: RateLimits


def create(url: str, wanted: Wanted, *, as_json: bool) -> int:
    """`diptych keys create`: prints the key, the one time it can be seen."""
    tenant = checked_tenant(wanted.tenant)
    if len(wanted.name) > _MAX_NAME_CHARS or not wanted.name.isprintable():
        raise CliError(f"--name: expected at most {_MAX_NAME_CHARS} printable characters", code=2)

    async def work(bus: Bus) -> None:
        if any(isinstance(e, Tenant) and e.purged_unix_ms for e in await entries(bus, tenant)):
            raise CliError(f"the tenant '{tenant}' was purged: its keys would not count")
        secret = KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        now_unix_ms = time.time_ns() // 1_000_000
        expires_ms = round((wanted.expires_s or 0) * 1000)
        key = ApiKey(
            key_id=secrets.token_hex(_ID_BYTES),
            sha256=digest(secret),
            shown=secret[:SHOWN_CHARS],
            tenant=tenant,
            name=wanted.name,
            role=wanted.role,
            created_unix_ms=now_unix_ms,
            created_by=who(),
            expires_unix_ms=now_unix_ms + expires_ms if expires_ms else 0,
            limits=wanted.limits,
        )
        first = not any(map(closes, await entries(bus)))
        async with audited(bus, Action.KEYS_CREATE, f"key:{key.key_id}") as doing:
            doing.detail = f"tenant {tenant}, role {key.role}, limits: {limits_text(key.limits)}"
            await keys_bucket(bus).create(key_entry(key.key_id), key)
        if as_json:
            print_json(facts(key) | {"key": secret})
            return
        print(f"key     {secret}")
        print(f"id      {key.key_id}")
        print(f"tenant  {key.tenant}, role {key.role}, limits: {limits_text(key.limits)}")
        print("Write the key down: it is stored nowhere and cannot be shown again.")
        if first:
            print("From now on every request to every gateway needs a key, on this machine too.")

    return on_bus(url, work)


def show_all(url: str, *, tenant: str | None, as_json: bool) -> int:
    """`diptych keys list`."""

    async def work(bus: Bus) -> None:
        found = await _keys(bus, tenant)
        if as_json:
            print_json([facts(key, of) for key, of in found])
        elif found:
            console().print(_table(found))
        else:
            print(NOTHING if tenant is None else f"no API keys of tenant '{tenant}'")

    return on_bus(url, work)


def show_one(url: str, wanted: str) -> int:
    """`diptych keys show`: everything that is known of one, as JSON."""

    async def work(bus: Bus) -> None:
        print_json(facts(*_pick(await _keys(bus), wanted)), indent=2)

    return on_bus(url, work)


def revoke(url: str, wanted: Sequence[str], *, forget: bool) -> int:
    """`diptych keys revoke`: no request with it is taken any more, within about a second."""

    async def work(bus: Bus) -> None:
        found = await _keys(bus)
        for key, _ in [_pick(found, one) for one in wanted]:
            action = Action.KEYS_FORGET if forget else Action.KEYS_REVOKE
            async with audited(bus, action, f"key:{key.key_id}") as doing:
                doing.detail = f"tenant {key.tenant}"
                if forget:
                    await keys_bucket(bus).delete(key_entry(key.key_id))
                else:
                    await _revoke(bus, key.key_id)
            print(f"{key.key_id} is revoked{' and forgotten' if forget else ''}")
        if forget and not any(map(closes, await entries(bus))):
            print(f"There are {NOTHING}.")

    return on_bus(url, work)


async def _revoke(bus: Bus, key_id: str) -> None:
    bucket = keys_bucket(bus)
    for _ in range(_TRIES):
        kept = await bucket.get(key_entry(key_id))
        if kept is None or not isinstance(kept.value, ApiKey):
            raise CliError(f"the key {key_id} is gone")
        if kept.value.revoked_unix_ms:
            return
        now_unix_ms = time.time_ns() // 1_000_000
        revoked = msgspec.structs.replace(kept.value, revoked_unix_ms=now_unix_ms)
        try:
            await bucket.update(kept.key, revoked, kept.revision)
        except Conflict:
            continue
        return
    raise CliError(f"somebody else is changing the key {key_id}: try again")


async def _keys(bus: Bus, tenant: str | None = None) -> list[tuple[ApiKey, Tenant | None]]:
    """Keys with their tenants' records, the newest last."""
    found: list[KeyEntry] = await entries(bus)
    tenants = {entry.tenant: entry for entry in found if isinstance(entry, Tenant)}
    keys = [key for key in found if isinstance(key, ApiKey) and tenant in (None, key.tenant)]
    keys.sort(key=lambda key: (key.created_unix_ms, key.key_id))
    return [(key, tenants.get(key.tenant)) for key in keys]


def _pick(
    found: Sequence[tuple[ApiKey, Tenant | None]], wanted: str
) -> tuple[ApiKey, Tenant | None]:
    """The one key that `wanted` means: its id or how that begins, or the key itself."""
    sha256 = digest(wanted)
    matches = [
        (key, tenant)
        for key, tenant in found
        if key.sha256 == sha256 or (wanted and key.key_id.startswith(wanted))
    ]
    shown = "that key" if wanted.startswith(KEY_PREFIX) else f"'{wanted}'"
    if not matches:
        raise CliError(f"there is no key {shown}; `diptych keys list` shows what there is")
    if len(matches) > 1:
        ids = ", ".join(key.key_id for key, _ in matches)
        raise CliError(f"{shown} means more than one key: {ids}")
    return matches[0]


def facts(key: ApiKey, tenant: Tenant | None = None) -> dict[str, Any]:
    """What is told of a key: never its hash."""
    return {
        "id": key.key_id,
        "shown": f"{key.shown}…",
        "tenant": key.tenant,
        "name": key.name,
        "role": key.role.value,
        "created": as_date(key.created_unix_ms),
        "created_by": key.created_by,
        "expires": as_date(key.expires_unix_ms),
        "revoked": as_date(key.revoked_unix_ms),
        "state": _state(key, tenant),
        "limits": {
            name: getattr(key.limits, name)
            for name in RateLimits.__struct_fields__
            if getattr(key.limits, name) is not None
        },
    }


def _state(key: ApiKey, tenant: Tenant | None) -> str:
    stands = standing(key, tenant, now_unix_ms=time.time_ns() // 1_000_000)
    return "active" if stands is Standing.GOOD else stands.name.lower()


def _table(found: Sequence[tuple[ApiKey, Tenant | None]]) -> Any:
    made = blank(*COLUMNS)
    for key, tenant in found:
        told = facts(key, tenant)
        made.add_row(
            key.key_id,
            told["shown"],
            key.tenant,
            key.name,
            key.role.value,
            told["created"],
            told["expires"] or "never",
            told["state"],
            limits_text(key.limits),
        )
    return made
