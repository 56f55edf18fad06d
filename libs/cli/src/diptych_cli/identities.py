"""What commands about keys, tenants and their use share: bucket `keys`, dates, limits."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import msgspec

from diptych_bus.port import Bucket, Bus, Gone, Kept
from diptych_cli.failing import CliError
from diptych_cli.joining import joined
from diptych_contracts.errors import Transient
from diptych_contracts.keys import KeyEntry, RateLimits, is_tenant
from diptych_contracts.streams import KEYS
from diptych_contracts.wire import Message

M = TypeVar("M", bound=Message)

_SPAN = re.compile(r"(?P<count>\d{1,6})(?P<unit>[smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def on_bus(url: str, work: Callable[[Bus], Awaitable[None]]) -> int:
    """Do `work` on the bus at `url`; gives the exit code."""

    async def run() -> None:
        async with joined(url) as bus:
            try:
                await work(bus)
            except Transient as err:
                raise CliError(f"the stack's bus does not answer any more: {err}") from err

    asyncio.run(run())
    return 0


def keys_bucket(bus: Bus) -> Bucket[KeyEntry]:
    """Bucket `keys`."""
    return bus.bucket(KEYS, cast("type[KeyEntry]", cast(Any, KeyEntry)))


async def listed(bucket: Bucket[M]) -> list[Kept[M]]:
    """Everything a bucket holds."""
    found: dict[str, Kept[M]] = {}

    def hear(change: Kept[M] | Gone) -> None:
        if isinstance(change, Gone):
            found.pop(change.key, None)
        else:
            found[change.key] = change

    watch = await bucket.watch(hear)
    await watch.close()
    return list(found.values())


async def entries(bus: Bus, tenant: str | None = None) -> list[KeyEntry]:
    """Everything bucket `keys` holds, of one tenant or of all."""
    found = [kept.value for kept in await listed(keys_bucket(bus))]
    return [entry for entry in found if tenant in (None, entry.tenant)]


def checked_tenant(name: str) -> str:
    """A tenant's name. Raises `CliError` if it cannot be one."""
    if not is_tenant(name):
        raise CliError(
            "a tenant's name has 1 to 64 lowercase letters, digits, '-' and '_', and begins and "
            f"ends with a letter or digit: got {name!r}",
            code=2,
        )
    return name


def span_s(text: str) -> float:
    """A time such as `90d`, in seconds. Raises `CliError`."""
    found = _SPAN.fullmatch(text)
    if found is None or not int(found["count"]):
        raise CliError(f"expected a time such as 12h, 90d or 52w, got {text!r}", code=2)
    return float(int(found["count"]) * _SECONDS[found["unit"]])


def limits_text(limits: RateLimits) -> str:
    """Limits as people read them."""
    told = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.concurrency, "at once"),
    )
    return ", ".join(f"{value} {what}" for value, what in told if value is not None) or "none"


def as_date(unix_ms: int) -> str:
    """A time in UTC; empty for 0."""
    if not unix_ms:
        return ""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="seconds")


def print_json(value: Any, *, indent: int = 0) -> None:
    """One line of JSON, or several."""
    encoded = msgspec.json.encode(value)
    print((msgspec.json.format(encoded, indent=indent) if indent else encoded).decode())
