"""`diptych kv trace`: the story of one request's transfers, as both sides tell it."""

import asyncio
import datetime
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from diptych_cli.failing import CliError
from diptych_cli.graveyard import SHOWN_AS
from diptych_cli.joining import joined
from diptych_cli.kv import collected, json_text, way
from diptych_cli.tables import printable
from diptych_contracts.control import KvAsk, KvSnapshot, KvTransfer
from diptych_contracts.ids import Incarnation

_MOST = 16
"""Transfers shown; for more the id must be longer."""
_HANDED_OVER = ("released",)
_NOT_HANDED_OVER = ("failed", "expired", "refused", "released")


@dataclass(slots=True)
class Told:
    """One side of a transfer: whose word it is, and when it was given."""

    worker: Incarnation
    unix_ms: int
    transfer: KvTransfer


@dataclass(slots=True)
class Sides:
    """What either side tells of one transfer; a side may not know it, or not answer."""

    writer: list[Told] = field(default_factory=list)
    reader: list[Told] = field(default_factory=list)


def trace(nats_url: str, name: str, *, as_json: bool) -> int:
    """Print all that the workers know of `name`, a transfer or a request."""
    beginning = plain(name)
    answers = asyncio.run(_asked(nats_url, KvAsk(about=beginning)))
    snapshots = [only(beginning, answer) for answer in answers]
    known = [one for one in snapshots if one.transfers or one.outgoing]
    if as_json:
        print(json_text(known))
        return 0 if known else 1
    if not known:
        raise CliError(
            f"no worker knows a transfer that begins with {beginning!r}: it was answered by one "
            "worker alone, or is longer ago than the workers remember"
        )
    for line in story(snapshots):
        print(printable(line))
    return 0


async def _asked(nats_url: str, ask: KvAsk) -> list[KvSnapshot]:
    async with joined(nats_url) as bus:
        return await collected(bus, ask)


def plain(name: str) -> str:
    """An id without what clients and logs put before it. Raises `CliError`."""
    for prefix in SHOWN_AS:
        name = name.removeprefix(prefix)
    if not name:
        raise CliError("expected the id of a request or a transfer, or how it begins", code=2)
    return name


def only(beginning: str, snapshot: KvSnapshot) -> KvSnapshot:
    """What it tells of transfers that begin so: a worker of an older version tells of all."""
    return msgspec.structs.replace(
        snapshot,
        transfers=tuple(t for t in snapshot.transfers if t.transfer_id.startswith(beginning)),
        outgoing=tuple(t for t in snapshot.outgoing if t.transfer_id.startswith(beginning)),
    )


def sides(snapshots: Sequence[KvSnapshot]) -> dict[str, Sides]:
    """By transfer, what either side tells."""
    found: dict[str, Sides] = defaultdict(Sides)
    for snapshot in snapshots:
        for transfer in snapshot.transfers:
            told = Told(snapshot.worker, snapshot.unix_ms, transfer)
            found[transfer.transfer_id].reader.append(told)
        for transfer in snapshot.outgoing:
            told = Told(snapshot.worker, snapshot.unix_ms, transfer)
            found[transfer.transfer_id].writer.append(told)
    return dict(sorted(found.items()))


def story(snapshots: Sequence[KvSnapshot]) -> Iterator[str]:
    """The lines that tell of every transfer found."""
    found = sides(snapshots)
    for transfer_id, both in tuple(found.items())[:_MOST]:
        yield transfer_id
        for told in both.writer:
            yield from _side("writer", told)
        for told in both.reader:
            yield from _side("reader", told)
        yield f"  {verdict(both)}"
        yield ""
    if len(found) > _MOST:
        yield f"{len(found) - _MOST} more begin so: give more of the id"


def _side(role: str, told: Told) -> Iterator[str]:
    transfer = told.transfer
    why = f": {transfer.reason}" if transfer.reason else ""
    yield f"  {told.worker}, its {role}: {transfer.state}{why}"
    for step in transfer.steps:
        at = _clock(told.unix_ms - step.ago_ms)
        yield f"    {at}  {step.state:9} {step.reason}".rstrip()
    if not transfer.ended_ms:
        yield f"    ends by itself in {max(0, transfer.left_ms) / 1000:.1f} s"
    yield f"    {facts(transfer)}"


def facts(transfer: KvTransfer) -> str:
    """What one side knows of how the bytes went."""
    told = [f"{transfer.n_bytes:,} bytes over {way(transfer) or 'no link'}"]
    if transfer.raw_bytes > transfer.n_bytes:
        told.append(f"{transfer.raw_bytes:,} before they were encoded")
    if transfer.slots:
        told.append(f"{len(transfer.slots)} slots")
    if transfer.held_blocks:
        had = f"its reader had the {transfer.held_blocks} before"
        told.append(f"{transfer.blocks} blocks ({had})")
    if transfer.moving_ms:
        gb_per_s = transfer.n_bytes / transfer.moving_ms / 1e6
        told.append(f"moved in {transfer.moving_ms:.1f} ms ({gb_per_s:.2f} GB/s)")
        told.append(f"{transfer.overlap_frac:.0%} of it during compute")
    if transfer.remainder_ms:
        told.append(f"taken over {transfer.remainder_ms:.1f} ms after compute")
    if transfer.in_quarantine:
        told.append("in quarantine")
    return ", ".join(told)


def verdict(both: Sides) -> str:
    """Whether the two sides tell the same."""
    if not both.writer:
        gone = both.reader[0].transfer.writer
        return f"its writer {gone} does not answer, or has forgotten it"
    if not both.reader:
        gone = both.writer[0].transfer.reader
        return f"its reader {gone} does not answer, never had it, or has forgotten it"
    writer, reader = both.writer[0].transfer, both.reader[0].transfer
    if not (writer.ended_ms and reader.ended_ms):
        return "under way"
    if writer.reason == "handed over":
        agree = reader.state in _HANDED_OVER and reader.reason == "imported"
        what = "handed over"
    else:
        agree = reader.state in _NOT_HANDED_OVER and reader.reason != "imported"
        what = "not handed over"
    return f"both sides agree: {what}" if agree else f"the sides differ: its writer says {what}"


def _clock(unix_ms: float) -> str:
    at = datetime.datetime.fromtimestamp(unix_ms / 1000, tz=datetime.UTC)
    return at.strftime("%H:%M:%S.%f")[:-3]
