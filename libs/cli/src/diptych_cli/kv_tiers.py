"""`diptych kv tiers`: where each worker keeps KV beyond its engine, and what it was good for."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from diptych_bus.port import Bus
from diptych_cli.failing import need
from diptych_cli.identities import listed
from diptych_cli.joining import joined
from diptych_cli.tables import blank, console, printable
from diptych_contracts import subjects
from diptych_contracts.control import TiersAsk, TiersSnapshot
from diptych_contracts.errors import BusAway
from diptych_contracts.fleet import WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_contracts.streams import WORKERS
from diptych_contracts.tiers import TierUsage

_ANSWER_S = 1.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
COLUMNS = (
    *("tier", "blocks", "bytes", "budget", "hits", "misses", "corrupt", "errors"),
    *("written", "dropped", "read MB/s", "away"),
)


def tiers(nats_url: str, *, as_json: bool) -> int:
    """Print every worker's tiers."""
    snapshots = asyncio.run(_asked(nats_url))
    if as_json:
        facts = {"time_unix_ms": time.time_ns() // 1_000_000, "workers": snapshots}
        print(msgspec.json.encode(facts).decode())
    else:
        console().print(table(snapshots))
    return 0


async def _asked(nats_url: str) -> list[TiersSnapshot]:
    async with joined(nats_url) as bus:
        return await collected(bus)


async def collected(bus: Bus) -> list[TiersSnapshot]:
    """What every worker that answers says, by name."""
    workers = sorted(kept.key for kept in await listed(bus.bucket(WORKERS, WorkerRegistration)))
    answers = await asyncio.gather(*(_asked_one(bus, Incarnation(name)) for name in workers))
    return [answer for answer in answers if answer is not None]


async def _asked_one(bus: Bus, worker: Incarnation) -> TiersSnapshot | None:
    try:
        answer: TiersSnapshot = await bus.request(
            subjects.control(worker), TiersAsk(), TiersSnapshot, timeout_s=_ANSWER_S
        )
    except BusAway:
        return None  # gone: its registration lives a little longer
    return answer


def table(snapshots: Sequence[TiersSnapshot]) -> Any:
    """Each worker, and under it a row for every tier."""
    parts: list[Any] = []
    for snapshot in snapshots:
        parts.append(need("rich.text").Text(printable(headline(snapshot)), style="bold"))
        if snapshot.tiers:
            made = blank(*COLUMNS, right=COLUMNS[1:-1], fold=("tier", "away"))
            for usage in snapshot.tiers:
                made.add_row(*map(printable, row(usage)))
            parts.append(made)
    return need("rich.console").Group(*parts)


def headline(snapshot: TiersSnapshot) -> str:
    """What a worker got out of its tiers."""
    if not snapshot.tiers:
        return f"{snapshot.worker}  no tiers (KV_TIERS is empty)"
    told = [f"{snapshot.restored} prompts began with {snapshot.restored_tokens:,} tokens restored"]
    if snapshot.late:
        told.append(f"{snapshot.late} reads were too late")
    if snapshot.dropped:
        told.append(f"{snapshot.dropped} blocks found no room on their way")
    return f"{snapshot.worker}  {'; '.join(told)}"


def row(usage: TierUsage) -> tuple[str, ...]:
    """What the table says of a tier."""
    away = usage.away
    if usage.forgetting:
        away = f"{away}; {usage.forgetting} tenants to be forgotten".removeprefix("; ")
    return (
        usage.name,
        "?" if usage.entries is None else f"{usage.entries:,}",
        _size(usage.bytes, "?"),
        _size(usage.budget_bytes, "its own"),
        f"{usage.hits:,}",
        f"{usage.misses:,}",
        f"{usage.corrupt:,}",
        f"{usage.errors:,}",
        f"{usage.stored:,}",
        f"{usage.dropped:,}",
        f"{usage.read_bytes_per_s / 1e6:,.0f}",
        away,
    )


def _size(n_bytes: int | None, unknown: str) -> str:
    if n_bytes is None:
        return unknown
    size, unit = float(n_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{n_bytes} B"
