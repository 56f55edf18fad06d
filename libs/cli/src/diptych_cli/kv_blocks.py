"""`diptych kv blocks`: which transfer holds which slots of each worker, and what is cached."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from diptych_cli.failing import need
from diptych_cli.joining import joined
from diptych_cli.kv import collected, json_text, short
from diptych_cli.tables import blank, console, printable
from diptych_contracts.control import KvAsk, KvSnapshot, KvTransfer

COLUMNS = ("transfer", "state", "slots", "which", "bytes", "age", "from")
_MOST_RUNS = 12
"""Of slots that follow one another, in one row."""


def blocks(nats_url: str, *, as_json: bool) -> int:
    """Print what holds each worker's slots."""
    snapshots = asyncio.run(_asked(nats_url))
    if as_json:
        print(json_text(snapshots))
    else:
        console().print(table(snapshots))
    return 0


async def _asked(nats_url: str) -> list[KvSnapshot]:
    async with joined(nats_url) as bus:
        return await collected(bus, KvAsk(slots=True))


def table(snapshots: Sequence[KvSnapshot]) -> Any:
    """Each worker, and under it a row for every transfer that holds slots."""
    parts: list[Any] = []
    for snapshot in snapshots:
        parts.append(need("rich.text").Text(printable(headline(snapshot)), style="bold"))
        if snapshot.transfers:
            made = blank(*COLUMNS, right=("slots", "bytes", "age"), fold=("which", "from"))
            for transfer in snapshot.transfers:
                made.add_row(*map(printable, row(transfer, snapshot.slot_bytes)))
            parts.append(made)
    return need("rich.console").Group(*parts)


def headline(snapshot: KvSnapshot) -> str:
    """What a worker has, and how much of it is taken."""
    used, quarantined = snapshot.slots_used, snapshot.slots_quarantined
    return (
        f"{snapshot.worker}  {snapshot.slots} slots of {snapshot.slot_bytes:,} bytes: "
        f"{snapshot.slots - used} free, {used - quarantined} held, {quarantined} in quarantine; "
        f"{snapshot.prefix_blocks} blocks cached"
    )


def row(transfer: KvTransfer, slot_bytes: int) -> tuple[str, ...]:
    """What holds slots, which, and for how long."""
    return (
        short(transfer.transfer_id),
        f"{transfer.state}, quarantined" if transfer.in_quarantine else transfer.state,
        str(len(transfer.slots)),
        which(transfer.slots, transfer.generations),
        f"{len(transfer.slots) * slot_bytes:,}",
        f"{transfer.age_ms / 1000:.1f} s",
        transfer.writer,
    )


def which(slots: Sequence[int], generations: Sequence[int]) -> str:
    """Slots as runs, each with its generation: `0-7 (3), 9 (2)`."""
    runs = list(_runs(slots, generations))
    told = [
        f"{first}-{last} ({generation})" if last > first else f"{first} ({generation})"
        for first, last, generation in runs[:_MOST_RUNS]
    ]
    if len(runs) > _MOST_RUNS:
        told.append(f"and {len(runs) - _MOST_RUNS} more")
    return ", ".join(told)


def _runs(slots: Sequence[int], generations: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    first = last = generation = -1
    for slot, own in zip(slots, generations, strict=True):
        if first >= 0 and (slot, own) == (last + 1, generation):
            last = slot
            continue
        if first >= 0:
            yield first, last, generation
        first, last, generation = slot, slot, own
    if first >= 0:
        yield first, last, generation
