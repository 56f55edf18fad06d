"""`/v1/batches`: create, list, retrieve, cancel. What runs them: `runner`."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import sha256
from random import Random

import msgspec
from starlette.types import Receive, Scope, Send

from diptych_bus.port import Kept
from diptych_contracts.batches import BatchRecord, BatchState, StoredFile
from diptych_contracts.errors import Conflict, InvalidRequest
from diptych_contracts.ids import new_request_id
from diptych_contracts.streams import FILE_TTL_S
from diptych_gateway.answering.delivering import send_json
from diptych_gateway.batches.objects import BatchList, shown
from diptych_gateway.errors import ApiError
from diptych_gateway.files.board import Board
from diptych_gateway.files.paging import page, paging
from diptych_gateway.files.serving import PREFIX as FILE_PREFIX
from diptych_gateway.files.serving import is_id, no_file, once_or
from diptych_gateway.files.store import FileStore
from diptych_gateway.idempotency.header import in_use, key_of
from diptych_gateway.judging.bodies import ABSENT, decode_as
from diptych_gateway.judging.checking import check_metadata
from diptych_gateway.listening.intake import Intake

PREFIX = "batch_"
WINDOW = "24h"
WINDOW_S = 24 * 3600


class BatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: msgspec.Raw = ABSENT


_decoder = msgspec.json.Decoder(BatchBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The handlers of batches."""

    board: Board[BatchRecord]
    files: FileStore
    intake: Intake
    endpoints: Collection[str]
    rng: Random
    unix_ms: Callable[[], int]
    window_s: float
    max_open: int
    """Batches of a tenant that are not over."""

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/batches`."""
        tenant: str = scope["state"]["tenant"]
        data = await self.intake.read(scope["headers"], receive)
        body = decode_as(_decoder, data)
        metadata = tuple(check_metadata(body.metadata).items())
        self._check(body)
        batch_id = PREFIX + once_or(key_of(scope), tenant, new_request_id(self.rng))
        now = self.unix_ms()
        record = BatchRecord(
            batch_id=batch_id,
            tenant=tenant,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            metadata=metadata,
            digest=sha256(data).hexdigest(),
            created_unix_ms=now,
            expires_unix_ms=now + int(self.window_s * 1000),
        )
        found = await self.board.bucket.get(batch_id)
        if found is None:
            await self._input(body, tenant)
            self._check_open(tenant)
            found = await self._create(record)
        if found.value.digest != record.digest:
            raise in_use()
        await _send(send, shown(found.value))

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/batches`."""
        asked = paging(scope, most=100, usual=20)
        tenant = scope["state"]["tenant"]
        found = sorted(
            (record for record in self.board if record.tenant == tenant),
            key=lambda record: (record.created_unix_ms, record.batch_id),
            reverse=True,
        )
        chosen, has_more = page(found, asked, name=lambda record: record.batch_id)
        data = [shown(record) for record in chosen]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        await _send(send, BatchList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/batches/{id}`."""
        await _send(send, shown((await self._found(scope)).value))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/batches/{id}/cancel`: what has ended stays as it is."""
        while True:
            kept = await self._found(scope)
            record = kept.value
            if record.state.is_over or record.state is BatchState.CANCELLING:
                break
            if record.state is BatchState.FINALIZING:
                text = f"the batch '{record.batch_id}' is being finalized"
                raise ApiError(409, text, code="batch_finalizing")
            record = msgspec.structs.replace(
                record, state=BatchState.CANCELLING, cancelling_unix_ms=self.unix_ms()
            )
            try:
                revision = await self.board.bucket.update(
                    record.batch_id, record, kept.revision, ttl_s=FILE_TTL_S
                )
            except Conflict:
                continue
            self.board.note(Kept(record.batch_id, record, revision))
            break
        await _send(send, shown(record))

    async def _create(self, record: BatchRecord) -> Kept[BatchRecord]:
        bucket = self.board.bucket
        while True:
            try:
                revision = await bucket.create(record.batch_id, record, ttl_s=FILE_TTL_S)
            except Conflict:
                kept = await bucket.get(record.batch_id)
                if kept is None:
                    continue
                return kept
            kept = Kept(record.batch_id, record, revision)
            self.board.note(kept)
            return kept

    async def _found(self, scope: Scope) -> Kept[BatchRecord]:
        wanted: str = scope["path_params"]["batch_id"]
        kept = await self.board.bucket.get(wanted) if is_id(wanted, PREFIX) else None
        if kept is None or kept.value.tenant != scope["state"]["tenant"]:
            text = f"there is no batch '{wanted[:80]}' (any more)"
            raise ApiError(404, text, code="batch_not_found", param="batch_id")
        return kept

    async def _input(self, body: BatchBody, tenant: str) -> StoredFile:
        wanted = body.input_file_id
        file = await self.files.get(wanted, tenant=tenant) if is_id(wanted, FILE_PREFIX) else None
        if file is None:
            raise no_file(wanted, "input_file_id")
        return file

    def _check(self, body: BatchBody) -> None:
        if body.endpoint not in self.endpoints:
            expected = ", ".join(map(repr, sorted(self.endpoints)))
            text = f"'endpoint': expected one of {expected}, saw {body.endpoint[:80]!r}"
            raise InvalidRequest(text, param="endpoint")
        if body.completion_window != WINDOW:
            text = f"'completion_window': expected '{WINDOW}', saw {body.completion_window[:40]!r}"
            raise InvalidRequest(text, param="completion_window")

    def _check_open(self, tenant: str) -> None:
        n_open = sum(r.tenant == tenant and not r.state.is_over for r in self.board)
        if n_open >= self.max_open:
            text = f"{n_open} batches are not over yet, the limit"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=60.0)


async def _send(send: Send, value: msgspec.Struct) -> None:
    await send_json(send, 200, msgspec.json.encode(value))
