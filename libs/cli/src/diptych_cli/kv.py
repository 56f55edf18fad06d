"""`diptych kv transfers`: the KV transfers on their way to each worker, and from it."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from diptych_bus.port import Bus, Gone, Kept
from diptych_cli.failing import need
from diptych_cli.joining import joined
from diptych_cli.tables import blank, console, printable
from diptych_contracts import subjects
from diptych_contracts.codecs import RAW
from diptych_contracts.control import KvAsk, KvSnapshot, KvTransfer
from diptych_contracts.errors import BusAway
from diptych_contracts.fleet import WorkerRegistration
from diptych_contracts.streams import WORKERS

_ANSWER_S = 1.0
_PERIOD_S = 0.5
COLUMNS = ("transfer", "state", "peer", "link", "age", "left", "bytes", "why it ended")
_LONG = ("peer", "why it ended")
"""Folded where the terminal is narrow: at 80 columns whole columns were cut away."""
_SHOWN_ID = 8
"""Of a request's 32: as many as other commands ask for."""


def kv(nats_url: str, *, ended: int, as_json: bool, watch: bool) -> int:
    """Print every transfer; with `watch` again and again."""
    try:
        asyncio.run(_show(nats_url, KvAsk(ended=ended), as_json=as_json, watch=watch))
    except KeyboardInterrupt:
        if not watch:
            raise
    return 0


async def _show(nats_url: str, ask: KvAsk, *, as_json: bool, watch: bool) -> None:
    async with joined(nats_url) as bus:
        if not watch:
            snapshots = await collected(bus, ask)
            if as_json:
                print(json_text(snapshots))
            else:
                console().print(table(snapshots))
            return
        while as_json:
            print(json_text(await collected(bus, ask)), flush=True)
            await asyncio.sleep(_PERIOD_S)
        live: Any = need("rich.live")
        with live.Live(console=console(), auto_refresh=False) as screen:
            while True:
                screen.update(table(await collected(bus, ask)), refresh=True)
                await asyncio.sleep(_PERIOD_S)


async def collected(bus: Bus, ask: KvAsk) -> list[KvSnapshot]:
    """What every worker that answers says, by name."""
    workers: list[str] = []

    def seen(change: Kept[WorkerRegistration] | Gone) -> None:
        if isinstance(change, Kept):
            workers.append(change.key)

    watching = await bus.bucket(WORKERS, WorkerRegistration).watch(seen)
    await watching.close()
    answers = await asyncio.gather(*(_asked(bus, worker, ask) for worker in sorted(workers)))
    return [answer for answer in answers if answer is not None]


async def _asked(bus: Bus, worker: Any, ask: KvAsk) -> KvSnapshot | None:
    try:
        snapshot: KvSnapshot = await bus.request(
            subjects.control(worker), ask, KvSnapshot, timeout_s=_ANSWER_S
        )
    except BusAway:
        return None  # gone: its registration lives a little longer
    return snapshot


def json_text(snapshots: Sequence[KvSnapshot]) -> str:
    """One line: who asked when, and every worker's answer."""
    facts = {"time_unix_ms": time.time_ns() // 1_000_000, "workers": snapshots}
    return msgspec.json.encode(facts).decode()


def table(snapshots: Sequence[KvSnapshot]) -> Any:
    """Each worker, and under it a row for every transfer."""
    parts: list[Any] = []
    for snapshot in snapshots:
        used = f"{snapshot.slots_used} of {snapshot.slots} slots in use"
        parts.append(need("rich.text").Text(printable(f"{snapshot.worker}  {used}"), style="bold"))
        if snapshot.transfers or snapshot.outgoing:
            made = blank(*COLUMNS, right=("age", "left", "bytes"), fold=_LONG)
            for transfer in (*snapshot.transfers, *snapshot.outgoing):
                made.add_row(*map(printable, row(transfer)))
            parts.append(made)
    return need("rich.console").Group(*parts)


def row(transfer: KvTransfer) -> tuple[str, ...]:
    """What the table says of a transfer."""
    over = transfer.ended_ms or (not transfer.left_ms and not transfer.age_ms)
    return (
        short(transfer.transfer_id),
        transfer.state,
        f"to {transfer.reader}" if transfer.reader else f"from {transfer.writer}",
        way(transfer),
        "" if over else f"{transfer.age_ms / 1000:.1f} s",
        "" if over else f"{max(0, transfer.left_ms) / 1000:.1f} s",
        f"{transfer.n_bytes:,}",
        transfer.reason,
    )


def short(transfer_id: str) -> str:
    """Its id as tables show it; commands take it so."""
    request, _, attempt = transfer_id.rpartition(".")
    return f"{request[:_SHOWN_ID]}.{attempt}"


def way(transfer: KvTransfer) -> str:
    """Its link, and what its bytes went through."""
    through = ("TLS" if transfer.tls else "", "sealed" if transfer.sealed else "")
    codec = "" if transfer.codec == RAW else transfer.codec
    return ", ".join(part for part in (transfer.link, *through, codec) if part)
