"""`diptych tenants purge`: everything of a tenant is deleted, and what must remain is named.

In this order, so that one that breaks off can be run again, and who writes late finds a tombstone:

1. the tombstone: from then on none of its keys counts, at any door;
2. its requests and batches are cancelled and have ended (those of a fleet without schedulers never
   do: then it says so);
3. what was used is summed, so that no gateway writes it down afterwards;
4. all of it is deleted, what is referred to before what refers to it, until nothing is found;
5. workers drop its cached KV, in their engines and in every tier.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from diptych_bus.port import Bus, Kept
from diptych_cli.failing import CliError
from diptych_cli.identities import keys_bucket, listed
from diptych_cli.joining import Sign
from diptych_cli.tenant_data import ENDED, TenantData, allowance_names, going_on, survey
from diptych_contracts import subjects
from diptych_contracts.allowances import Allowance
from diptych_contracts.batches import BatchRecord, BatchState, LineResult, StoredFile
from diptych_contracts.control import ForgetAnswer, ForgetTenant, TenantKept
from diptych_contracts.errors import Conflict, Transient
from diptych_contracts.fleet import WorkerRegistration
from diptych_contracts.idempotency import Claim
from diptych_contracts.ids import Incarnation
from diptych_contracts.keys import UNLIMITED, Tenant, key_entry, tenant_entry
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.responses import StoredResponse
from diptych_contracts.streams import (
    ALLOWANCES,
    BATCH_RESULTS,
    BATCHES,
    DEAD,
    EVENTS,
    FILES,
    IDEMPOTENCY,
    REQUEST_RECORDS,
    REQUESTS,
    RESPONSES,
    TOKENS,
    USAGE,
    WORKERS,
)
from diptych_contracts.usage import CURSOR, UsageCursor, UsageEntry

REASON = "its tenant is no more"
_SETTLED = (RecordState.CANCELLING, RecordState.ENDING, RecordState.CLOSED)
_TRIES = 5
_AT_ONCE = 32
_PAUSE_S = 0.2
_WORKER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a purge waits, in seconds."""

    known_s: float = 2.0
    """For every gateway to know that the tenant is no more: a change of bucket `keys` takes one."""
    ended_s: float = 30.0
    """For its requests and batches to end."""
    summed_s: float = 10.0
    """For gateways to sum what was used; they do so every 2 s."""


@dataclass(slots=True)
class Purged:
    """What came of it."""

    deleted: dict[str, int] = field(default_factory=dict)
    cached_prefixes: int = 0
    tier_entries: int = 0
    """KV blocks removed from workers' tiers; of a tier that several share, each removes its own."""
    remains: list[str] = field(default_factory=list)
    """What is left, with the time it goes by itself."""
    unfinished: list[str] = field(default_factory=list)
    """What should not be left: run it again."""


async def purge(
    bus: Bus, tenant: str, *, keep_usage: bool, sign: Sign, patience: Patience
) -> Purged:
    """Delete everything of `tenant`; `sign` orders its workers to.

    Raises:
        CliError: somebody else changes the tenant at the same time.
        Transient: the bus does not answer; what was deleted stays so.
    """
    done = Purged()
    await _bury(bus, tenant)
    await asyncio.sleep(patience.known_s)
    await _end_all(bus, tenant, patience.ended_s)
    if not keep_usage and not await _summed(bus, patience.summed_s):
        done.unfinished.append("no gateway has summed its last use: that is written down later")
    found = await survey(bus, tenant)
    for _ in range(_TRIES):
        _count(done.deleted, found, keep_usage=keep_usage)
        await _delete(bus, found, keep_usage=keep_usage)
        found = await survey(bus, tenant)
        if not _left(found, keep_usage=keep_usage):
            break
        await asyncio.sleep(_PAUSE_S)
    await _forget_kv(bus, tenant, sign, done)
    _tell_rest(done, found, keep_usage=keep_usage)
    return done


async def _bury(bus: Bus, tenant: str) -> None:
    bucket, now_unix_ms = keys_bucket(bus), time.time_ns() // 1_000_000
    kept = await bucket.get(tenant_entry(tenant))
    try:
        if kept is None:
            fresh = Tenant(tenant=tenant, created_unix_ms=now_unix_ms, purged_unix_ms=now_unix_ms)
            await bucket.create(tenant_entry(tenant), fresh)
        elif isinstance(kept.value, Tenant) and not kept.value.purged_unix_ms:
            buried = msgspec.structs.replace(
                kept.value, limits=UNLIMITED, purged_unix_ms=now_unix_ms
            )
            await bucket.update(kept.key, buried, kept.revision)
    except Conflict as err:
        raise CliError(f"somebody else is changing tenant '{tenant}': try again") from err


async def _end_all(bus: Bus, tenant: str, patience_s: float) -> None:
    """Cancel what runs, until nothing does or patience is over."""
    give_up_s = time.monotonic() + patience_s
    while True:
        found = await going_on(bus, tenant)
        live = [kept for kept in found.records if kept.value.state is not RecordState.CLOSED]
        known = {kept.key for kept in found.records}
        new = [request for request in found.requests.values() if request.request_id not in known]
        batches = [kept for kept in found.batches if not kept.value.state.is_over]
        if not (live or new or batches) or time.monotonic() >= give_up_s:
            return
        for kept in live:
            await _cancel(bus, kept)
        for request in new:
            await _mark(bus, request)
        for batch in batches:
            await _cancel_batch(bus, batch)
        await asyncio.sleep(_PAUSE_S)


async def _cancel(bus: Bus, kept: Kept[RequestRecord]) -> None:
    """As a gateway does; whoever else changes the record now is asked again in the next round."""
    if kept.value.state in _SETTLED:
        return
    changed = msgspec.structs.replace(
        kept.value, state=RecordState.CANCELLING, cancel_reason=REASON
    )
    await _unless_changed(
        bus.bucket(REQUEST_RECORDS, RequestRecord).update(kept.key, changed, kept.revision)
    )


async def _mark(bus: Bus, request: Request) -> None:
    """A request that no scheduler has taken on: whoever does will cancel it."""
    record = RequestRecord(
        request_id=request.request_id,
        owner=Incarnation(request.gateway),
        gateway=request.gateway,
        state=RecordState.CANCELLING,
        deadline_unix_ms=request.deadline_unix_ms,
        cancel_reason=REASON,
        tenant=request.tenant,
    )
    bucket = bus.bucket(REQUEST_RECORDS, RequestRecord)
    await _unless_changed(bucket.create(request.request_id, record, ttl_s=REQUESTS.max_age_s))


async def _cancel_batch(bus: Bus, kept: Kept[BatchRecord]) -> None:
    if kept.value.state is BatchState.CANCELLING:
        return
    changed = msgspec.structs.replace(
        kept.value, state=BatchState.CANCELLING, cancelling_unix_ms=bus.unix_ms()
    )
    await _unless_changed(bus.bucket(BATCHES, BatchRecord).update(kept.key, changed, kept.revision))


async def _unless_changed(writing: Awaitable[int]) -> None:
    try:
        await writing
    except Conflict:
        return


async def _summed(bus: Bus, patience_s: float) -> bool:
    """Wait until every end told by now is in the books; False if nobody sums."""
    newest = 0
    async for item in bus.all_stored(EVENTS.name, subject=subjects.event(ENDED)):
        newest = item.seq
    usage = bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry)))
    give_up_s = time.monotonic() + patience_s
    while True:
        kept = await usage.get(CURSOR)
        cursor = kept.value.seq if kept is not None and isinstance(kept.value, UsageCursor) else 0
        if cursor >= newest:
            return True
        if time.monotonic() >= give_up_s:
            return False
        await asyncio.sleep(_PAUSE_S)


async def _delete(bus: Bus, found: TenantData, *, keep_usage: bool) -> None:
    async def each(some: Iterable[Any], delete: Callable[[Any], Awaitable[None]]) -> None:
        waiting = list(some)
        for first in range(0, len(waiting), _AT_ONCE):
            await asyncio.gather(*map(delete, waiting[first : first + _AT_ONCE]))

    closed = [k.key for k in found.records if k.value.state is RecordState.CLOSED]
    await each(found.objects, lambda name: bus.delete_object(*name))
    await each(found.results, bus.bucket(BATCH_RESULTS, LineResult).delete)
    await each((k.key for k in found.batches), bus.bucket(BATCHES, BatchRecord).delete)
    await each((f.file_id for f in found.files), bus.bucket(FILES, StoredFile).delete)
    await each((k.key for k in found.responses), bus.bucket(RESPONSES, StoredResponse).delete)
    await each((k.key for k in found.claims), bus.bucket(IDEMPOTENCY, Claim).delete)
    await each(found.dead, lambda seq: bus.erase(DEAD.name, seq))
    await each(found.frames, lambda seq: bus.erase(TOKENS.name, seq))
    await each(found.requests, lambda seq: bus.erase(REQUESTS.name, seq))
    await each(closed, bus.bucket(REQUEST_RECORDS, RequestRecord).delete)
    await each(allowance_names(found), bus.bucket(ALLOWANCES, Allowance).delete)
    await each((key_entry(key.key_id) for key in found.keys), keys_bucket(bus).delete)
    if not keep_usage:
        usage = bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry)))
        await each(found.days, usage.delete)


def _count(deleted: dict[str, int], found: TenantData, *, keep_usage: bool) -> None:
    for name, count in _countable(found, keep_usage=keep_usage).items():
        deleted[name] = deleted.get(name, 0) + count


def _countable(found: TenantData, *, keep_usage: bool) -> dict[str, int]:
    live = sum(kept.value.state is not RecordState.CLOSED for kept in found.records)
    counts = {**found.counts, "requests": found.counts["requests"] - live}
    return {k: n for k, n in counts.items() if n and not (keep_usage and k == "days of use")}


def _left(found: TenantData, *, keep_usage: bool) -> bool:
    return bool(_countable(found, keep_usage=keep_usage))


async def _forget_kv(bus: Bus, tenant: str, sign: Sign, done: Purged) -> None:
    order = ForgetTenant(tenant=tenant)
    for kept in await listed(bus.bucket(WORKERS, WorkerRegistration)):
        subject = subjects.control(Incarnation(kept.key))
        signed = sign(subject, order)
        try:
            told: ForgetAnswer = await bus.request(
                subject, signed, ForgetAnswer, timeout_s=_WORKER_S
            )
        except Transient:
            done.unfinished.append(f"worker {kept.key} did not answer: it may hold cached KV")
        else:
            if isinstance(told, TenantKept):
                done.unfinished.append(f"worker {kept.key} may hold cached KV: {told.reason}")
            else:
                done.cached_prefixes += told.sequences
                done.tier_entries += told.tier_entries
                done.unfinished += [
                    f"KV tier {tier} of worker {kept.key} is out of reach: what it holds is given "
                    "to nobody, and deleted once it is back, if that worker lives so long"
                    for tier in told.tiers_away
                ]


def _tell_rest(done: Purged, found: TenantData, *, keep_usage: bool) -> None:
    live = [kept.key for kept in found.records if kept.value.state is not RecordState.CLOSED]
    if live:
        done.unfinished.append(f"{len(live)} requests are cancelled and have not ended")
    left = _countable(found, keep_usage=keep_usage)
    done.unfinished += [f"{count} {name} came back" for name, count in left.items()]
    minutes = int(TOKENS.max_age_s / 60)
    if found.shared_frames:
        done.remains.append(
            f"tokens of its answers in {found.shared_frames} frames of the journal that hold "
            f"other tenants' too: {minutes} min at most"
        )
    done.remains.append(f"starts and ends of its requests in the journal, no text: {minutes} min")
    done.remains.append("its name and numbers in life-cycle events: 24 h; in the audit: 400 d")
    if found.unreadable:
        done.remains.append(
            f"{found.unreadable} unreadable dead messages, perhaps its own: 7 d at most"
        )
    if keep_usage:
        done.remains.append(f"{len(found.days)} days of use, as asked for: 400 d")
    done.remains.append("copies of deleted messages in files of NATS, until it compacts them")
