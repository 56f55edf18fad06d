"""`diptych top`: a running stack at a glance."""

import asyncio
import time
from typing import Any

from diptych_bus.port import Bus, Delivery
from diptych_cli.failing import need
from diptych_cli.fleet_view import SILENT_AFTER_S, FleetView, Seen
from diptych_cli.joining import joined
from diptych_cli.presence import StackFile
from diptych_cli.tables import blank, console
from diptych_contracts import subjects
from diptych_contracts.fleet import Beat, WorkerLoad, WorkerRegistration
from diptych_contracts.journal import EndReason, JournalEntry, TokenFrame
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS, WORKERS

_FIRST_LOOK_S = 1.0
"""Ten beats of everybody."""
_PERIOD_S = 0.5
_NUMBERS = ("running", "waiting", "KV tokens", "tokens/s", "power", "energy")
COLUMNS = ("member", "pid", "state", *_NUMBERS)
_LIVE = tuple(state for state in RecordState if state is not RecordState.CLOSED)


def top(stack: StackFile, *, once: bool) -> int:
    """Show the stack until Ctrl-C, or `once`."""
    try:
        asyncio.run(_show(stack, once=once))
    except KeyboardInterrupt:
        if once:
            raise
    return 0


async def _show(stack: StackFile, *, once: bool) -> None:
    async with joined(stack.nats_url) as bus:
        view = FleetView(time.monotonic())
        await _listen(bus, view)
        await asyncio.sleep(_FIRST_LOOK_S)
        if once:
            console().print(picture(stack, view, time.monotonic(), connected=bus.connected))
            return
        live: Any = need("rich.live")
        with live.Live(console=console(), auto_refresh=False, screen=True) as screen:
            while True:
                now_s = time.monotonic()
                screen.update(picture(stack, view, now_s, connected=bus.connected), refresh=True)
                await asyncio.sleep(_PERIOD_S)


async def _listen(bus: Bus, view: FleetView) -> None:
    def beat(delivery: Delivery) -> None:
        view.beat(delivery.decode(Beat), time.monotonic())

    def load(delivery: Delivery) -> None:
        view.load(delivery.decode(WorkerLoad))

    def entry(delivery: Delivery) -> None:
        told = delivery.decode(JournalEntry)
        if isinstance(told, TokenFrame):
            view.tokens(told, time.monotonic())

    await bus.subscribe(subjects.BEATS, beat)
    await bus.subscribe(subjects.LOADS, load)
    await bus.subscribe(subjects.LIVES, entry)
    await bus.bucket(WORKERS, WorkerRegistration).watch(view.registered)
    await bus.bucket(REQUEST_RECORDS, RequestRecord).watch(view.recorded)


def picture(stack: StackFile, view: FleetView, now_s: float, *, connected: bool) -> Any:
    """Everything, ready to print."""
    group: Any = need("rich.console")
    table = blank(*COLUMNS, right=_NUMBERS)
    for seen in view.members(now_s):
        table.add_row(*row(seen, now_s, view.began_s))
    title = f"{stack.model} at {stack.base_url}"
    if not connected:
        title += " (the stack's bus does not answer)"
    return group.Group(title, table, requests_line(view))


def row(seen: Seen, now_s: float, began_s: float) -> tuple[str, ...]:
    """What the table says of one member."""
    start = (seen.beat.member, str(seen.beat.pid or ""), state(seen, now_s))
    load, registration = seen.load, seen.registration
    if load is None:
        return (*start, "", "", "", "", "", "")
    cells = f"{load.kv_tokens_used}"
    if registration is not None and registration.kv_tokens:
        share = load.kv_tokens_used / registration.kv_tokens
        cells = f"{load.kv_tokens_used}/{registration.kv_tokens} ({share:.0%})"
    return (
        *start,
        str(load.running),
        str(load.waiting),
        cells,
        f"{seen.tokens_per_s(now_s, began_s):.1f}",
        f"{load.power_w:.0f}/{load.cap_w:.0f} W",
        f"{load.energy_j:,.0f} J {load.energy_source}",
    )


def state(seen: Seen, now_s: float) -> str:
    """Whether a member serves, and if not, why."""
    silent_s = now_s - seen.beat_s
    if silent_s > SILENT_AFTER_S:
        return f"silent for {silent_s:.0f} s"
    if seen.beat.ready:
        return "ready"
    return seen.beat.detail or "not ready"


def requests_line(view: FleetView) -> str:
    """How requests fare: those under way by state, those that ended lately by how."""
    counts = view.requests()
    under_way = ", ".join(f"{counts[state]} {state}" for state in _LIVE)
    ended = ", ".join(f"{counts[reason]} {reason}" for reason in EndReason)
    return f"requests: {under_way}; ended in the last minutes: {ended}"
