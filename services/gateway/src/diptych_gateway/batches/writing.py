"""A batch's output and error file, put together from the results of its lines.

Both are written under names of the batch, so who has to write them again writes the same.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count

from diptych_bus.port import Bucket
from diptych_contracts.batches import BatchRecord, BatchState, LineResult, StoredFile, result_key
from diptych_contracts.errors import Transient
from diptych_contracts.idempotency import ClaimState, claim_key
from diptych_contracts.streams import FILE_TTL_S
from diptych_gateway.batches.lines import decode_line, unanswered
from diptych_gateway.batches.owning import patiently
from diptych_gateway.files.serving import PREFIX
from diptych_gateway.files.store import ContentWriter, FileGone, FileStore
from diptych_gateway.idempotency.claims import Claims
from diptych_gateway.idempotency.header import answer_name
from diptych_gateway.keeping.records import Records

_STOPPED = {
    True: ("batch_expired", "the batch expired before this request was done"),
    False: ("batch_cancelled", "the batch was cancelled before this request was done"),
}

Lines = AsyncGenerator[tuple[int, bytes], None]


@dataclass(slots=True)
class Written:
    """The files, and how many lines they hold."""

    good: int = 0
    bad: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFiles:
    """Writes them."""

    files: FileStore
    results: Bucket[LineResult]
    claims: Claims
    records: Records
    unix_ms: Callable[[], int]

    async def write(self, batch: BatchRecord, every: Lines, *, expired: bool) -> Written:
        """Both files, as far as they hold anything; what of the batch still runs is cancelled.

        Raises:
            FileGone: a part of a file is not there.
        """
        written = Written()
        output = self.files.writer(f"{batch.batch_id}.output")
        errors = self.files.writer(f"{batch.batch_id}.error")
        stopped = expired or batch.state is BatchState.CANCELLING
        async with aclosing(every) as lines:
            async for number, data in lines:
                kept = await self._result(batch, number)
                if kept is None:
                    if not stopped:
                        raise FileGone(f"the result of line {number} is no longer there")
                    await self._cancel(batch, number)
                    line, good = _left_out(batch, number, data, expired=expired), False
                else:
                    line, good = await self._data(kept), kept.good
                written.good += good
                written.bad += not good
                writer = output if good else errors
                await writer.patiently_write(line + b"\n")
        written.output_file_id = await self._file(batch, output, "output")
        written.error_file_id = await self._file(batch, errors, "error")
        return written

    async def forget(self, batch: BatchRecord, every: Lines) -> None:
        """Remove the results of a batch whose files are written, as far as the bus is there."""
        with suppress(Transient):
            async with aclosing(every) as lines:
                async for number, _ in lines:
                    key = result_key(batch.batch_id, number)
                    kept = await self.results.get(key)
                    if kept is not None and kept.value.part:
                        await self.files.drop_part(kept.value.part)
                    if kept is not None:
                        await self.results.delete(key)

    async def _result(self, batch: BatchRecord, number: int) -> LineResult | None:
        key = result_key(batch.batch_id, number)
        kept = await patiently(lambda: self.results.get(key))
        return None if kept is None else kept.value

    async def _data(self, result: LineResult) -> bytes:
        if not result.part:
            return result.data
        data = await patiently(lambda: self.files.part(result.part))
        if data is None:
            raise FileGone(f"the result '{result.part}' is no longer there")
        return data

    async def _cancel(self, batch: BatchRecord, number: int) -> None:
        line = result_key(batch.batch_id, number)
        name = claim_key(batch.tenant, batch.endpoint, f"\0{line}")
        for answer in count():
            one = answer_name(name, answer)
            kept = await patiently(lambda one=one: self.claims.get(one))  # type: ignore[misc]
            if kept is None:
                return
            if kept.value.state in (ClaimState.CLAIMED, ClaimState.STORED):
                self.records.cancel(kept.value, "its batch has stopped")

    async def _file(self, batch: BatchRecord, writer: ContentWriter, kind: str) -> str | None:
        await writer.patiently_finish()
        if not writer.n_bytes:
            return None
        now = self.unix_ms()
        file = StoredFile(
            file_id=PREFIX + sha256(writer.content.encode()).hexdigest()[:32],
            tenant=batch.tenant,
            filename=f"{batch.batch_id}_{kind}.jsonl",
            purpose="batch_output",
            n_bytes=writer.n_bytes,
            n_parts=writer.n_parts,
            content=writer.content,
            digest=writer.digest,
            created_unix_ms=now,
            expires_unix_ms=now + int(FILE_TTL_S * 1000),
        )
        return (await patiently(lambda: self.files.create(file))).file_id


def _left_out(batch: BatchRecord, number: int, data: bytes, *, expired: bool) -> bytes:
    code, message = _STOPPED[expired]
    line_id = f"batch_req_{sha256(result_key(batch.batch_id, number).encode()).hexdigest()[:32]}"
    return unanswered(decode_line(data).custom_id, line_id=line_id, code=code, message=message)
