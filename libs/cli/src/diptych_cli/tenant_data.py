"""Where a tenant's data are: every stream and bucket that holds any, looked through.

Requests are known by their records, by what is stored of them, and for a day by the event of their
end: so what only names a request (a frame of the journal, an object) is known to be the tenant's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from diptych_bus.port import Bus, Kept
from diptych_cli.identities import entries, listed
from diptych_contracts import subjects
from diptych_contracts.batches import BatchRecord, LineResult, StoredFile
from diptych_contracts.dead import DeadEntry, DeadLetter, DeadRequest, DeadRetried
from diptych_contracts.errors import Permanent
from diptych_contracts.events import RequestEnded
from diptych_contracts.idempotency import Claim
from diptych_contracts.journal import JournalEntry, TokenFrame
from diptych_contracts.keys import ApiKey, key_entry, tenant_entry
from diptych_contracts.requests import Request, RequestRecord
from diptych_contracts.responses import PREFIX, StoredResponse
from diptych_contracts.streams import (
    BATCH_RESULTS,
    BATCHES,
    DEAD,
    DEAD_PROMPTS,
    EVENTS,
    FILE_PARTS,
    FILES,
    IDEMPOTENCY,
    PROMPTS,
    REQUEST_RECORDS,
    REQUESTS,
    RESPONSE_PARTS,
    RESPONSES,
    TOKENS,
    USAGE,
)
from diptych_contracts.usage import UsageDay, UsageEntry

ENDED = "request_ended"


@dataclass(slots=True)
class TenantData:
    """Everything that is there of one tenant. Numbers are sequences of a stream."""

    tenant: str
    ids: set[str] = field(default_factory=set)
    """Its requests."""
    keys: list[ApiKey] = field(default_factory=list)
    records: list[Kept[RequestRecord]] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
    responses: list[Kept[StoredResponse]] = field(default_factory=list)
    claims: list[Kept[Claim]] = field(default_factory=list)
    files: list[StoredFile] = field(default_factory=list)
    batches: list[Kept[BatchRecord]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    unreadable: int = 0
    """Messages in stream `DEAD` that nobody can read: whose they are, nobody can tell."""
    frames: list[int] = field(default_factory=list)
    """Frames of the journal that hold tokens of this tenant only."""
    shared_frames: int = 0
    """Those that hold tokens of others too."""
    objects: list[tuple[str, str]] = field(default_factory=list)
    """(bucket, name)."""
    days: list[str] = field(default_factory=list)
    """Keys of bucket `usage`."""

    @property
    def counts(self) -> dict[str, int]:
        """How much there is of each kind."""
        return {
            "keys": len(self.keys),
            "requests": len(self.records) + len(self.requests),
            "responses": len(self.responses),
            "idempotency keys": len(self.claims),
            "files": len(self.files),
            "batches": len(self.batches),
            "batch results": len(self.results),
            "dead requests": len(self.dead),
            "journal frames": len(self.frames),
            "objects": len(self.objects),
            "days of use": len(self.days),
        }


async def going_on(bus: Bus, tenant: str) -> TenantData:
    """Its requests and batches alone, which is quickly looked up. Raises `Transient`."""
    found = TenantData(tenant)
    found.records = _own(await listed(bus.bucket(REQUEST_RECORDS, RequestRecord)), tenant)
    found.batches = _own(await listed(bus.bucket(BATCHES, BatchRecord)), tenant)
    await _stored_requests(bus, found)
    return found


async def survey(bus: Bus, tenant: str) -> TenantData:
    """All there is of `tenant` now. Raises `Transient`."""
    found = TenantData(tenant)
    await _buckets(bus, found)
    await _stored_requests(bus, found)
    async for item in bus.all_stored(EVENTS.name, subject=subjects.event(ENDED)):
        event: RequestEnded = item.delivery.decode(RequestEnded)
        if event.tenant == tenant:
            found.ids.add(event.request_id)
    await _dead(bus, found)
    found.claims += [
        kept
        for kept in await listed(bus.bucket(IDEMPOTENCY, Claim))
        if kept.value.tenant == tenant or kept.value.request_id in found.ids
    ]
    found.ids.update(kept.value.request_id for kept in found.claims)
    await _journal(bus, found)
    await _objects(bus, found)
    return found


def allowance_names(data: TenantData) -> list[str]:
    """Where bucket `allowances` may hold what is left of its limits."""
    return [tenant_entry(data.tenant), *(key_entry(key.key_id) for key in data.keys)]


async def _buckets(bus: Bus, found: TenantData) -> None:
    tenant = found.tenant
    mine = await entries(bus, tenant)
    found.keys = [entry for entry in mine if isinstance(entry, ApiKey)]
    found.records = _own(await listed(bus.bucket(REQUEST_RECORDS, RequestRecord)), tenant)
    found.responses = _own(await listed(bus.bucket(RESPONSES, StoredResponse)), tenant)
    found.batches = _own(await listed(bus.bucket(BATCHES, BatchRecord)), tenant)
    files = _own(await listed(bus.bucket(FILES, StoredFile)), tenant)
    found.files = [kept.value for kept in files]
    found.ids.update(record.value.request_id for record in found.records)
    found.ids.update(response.value.request_id for response in found.responses)
    batch_ids = {kept.key for kept in found.batches}
    found.results = [
        kept.key
        for kept in await listed(bus.bucket(BATCH_RESULTS, LineResult))
        if kept.key.partition(".")[0] in batch_ids
    ]
    usage = bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry)))
    found.days = [
        kept.key
        for kept in await listed(usage)
        if isinstance(kept.value, UsageDay) and kept.value.tenant == tenant
    ]


def _own(found: Iterable[Kept[Any]], tenant: str) -> list[Kept[Any]]:
    return [kept for kept in found if kept.value.tenant == tenant]


async def _stored_requests(bus: Bus, found: TenantData) -> None:
    async for item in bus.all_stored(REQUESTS.name, subject=REQUESTS.subjects[0]):
        try:
            request: Request = item.delivery.decode(Request)
        except Permanent:  # the schedulers move it to `DEAD`
            continue
        if request.tenant == found.tenant:
            found.requests[item.seq] = request
            found.ids.add(request.request_id)


async def _dead(bus: Bus, found: TenantData) -> None:
    retries: list[tuple[int, DeadRetried]] = []
    async for item in bus.all_stored(DEAD.name, subject=subjects.DEADS):
        try:
            entry: DeadRequest | DeadLetter | DeadRetried = item.delivery.decode(DeadEntry)
        except Permanent:  # written by a newer version
            found.unreadable += 1
            continue
        match entry:
            case DeadRequest(request=Request(tenant=tenant)) if tenant == found.tenant:
                found.dead.append(item.seq)
                found.ids.add(entry.request_id)
            case DeadRequest() if entry.request_id in found.ids:
                found.dead.append(item.seq)
            case DeadRetried():
                retries.append((item.seq, entry))
            case DeadLetter() if entry.request_id in found.ids:
                found.dead.append(item.seq)
            case DeadLetter():
                found.unreadable += 1
    found.dead += [seq for seq, entry in retries if entry.request_id in found.ids]


async def _journal(bus: Bus, found: TenantData) -> None:
    """Frames with its tokens. Starts, fences and ends say numbers only: they go with their age."""
    async for item in bus.all_stored(TOKENS.name, subject=TOKENS.subjects[0]):
        try:
            entry: JournalEntry = item.delivery.decode(JournalEntry)
        except Permanent:
            continue
        if not isinstance(entry, TokenFrame):
            continue
        mine = [part.request_id in found.ids for part in entry.entries]
        if mine and all(mine) and not _ends_of_others(entry, found.ids):
            found.frames.append(item.seq)
        elif any(mine):
            found.shared_frames += 1


def _ends_of_others(frame: TokenFrame, ids: set[str]) -> bool:
    return any(end.request_id not in ids for end in frame.ends)


async def _objects(bus: Bus, found: TenantData) -> None:
    prompts = found.ids | {
        request.prompt.name for request in found.requests.values() if request.prompt is not None
    }
    answers = {f"{kept.key}.answer" for kept in found.claims}
    contents = {file.content for file in found.files} | {kept.key for kept in found.batches}

    def owned(bucket: str, name: str) -> bool:
        if bucket == RESPONSE_PARTS:
            return name in answers or name.partition(".")[0].removeprefix(PREFIX) in found.ids
        return name in prompts if bucket != FILE_PARTS else name.partition(".")[0] in contents

    for bucket in (PROMPTS, DEAD_PROMPTS, RESPONSE_PARTS, FILE_PARTS):
        names = await bus.object_names(bucket)
        found.objects += [(bucket, name) for name in names if owned(bucket, name)]
