"""One batch from its input file to its output files, wherever its last owner stopped.

    validating → in_progress → finalizing → completed
        ↓             ↓ (24 h)                expired, with what is done
      failed      cancelling (a client asked) cancelled, with what is done

Each line is an idempotent request and its result is kept by its number, so a gateway that takes a
batch over walks through the same lines: what has a result is skipped, what runs is joined.
"""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import msgspec

from diptych_bus.port import Bucket
from diptych_contracts.batches import (
    BatchRecord,
    BatchState,
    LineFault,
    LineResult,
    StoredFile,
    result_key,
)
from diptych_contracts.errors import Transient
from diptych_contracts.streams import BATCH_RESULT_TTL_S
from diptych_gateway.batches.line_calls import LineCalls
from diptych_gateway.batches.lines import (
    InputLine,
    Inspection,
    TooLong,
    answered,
    decode_line,
    lines,
    named_model,
)
from diptych_gateway.batches.owning import LeaseLost, Ownership, patiently
from diptych_gateway.batches.writing import OutputFiles
from diptych_gateway.files.store import FileGone, FileStore
from diptych_gateway.listening.intake import SMALL_BYTES
from diptych_policy.batches import (
    MAX_ADOPTIONS,
    MODEL_NOT_FOUND,
    RENEW_S,
    Absences,
    Outcome,
    outcome,
    wait_s,
)
from diptych_telemetry import logger

_LOOK_S = 0.5
"""How soon a cancel is seen."""
_INSPECTED_BYTES = 256 * 1024
"""Of lines that are inspected in one go, about 10 ms."""
_MAX_RESULT_BYTES = 512 * 1024
"""Of a line's result in its bucket; a longer one is an object."""

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """What running a batch takes."""

    files: FileStore
    results: Bucket[LineResult]
    calls: LineCalls
    output: OutputFiles
    executor: Executor
    in_flight: int
    """Lines of a batch at once."""
    max_lines: int
    max_line_bytes: int


@dataclass(slots=True)
class BatchRun:
    """A batch, run by this gateway."""

    own: Ownership
    parts: BatchParts
    _completed: int = 0
    _failed: int = 0
    _done_here: int = field(default=0, init=False)
    _absences: Absences = field(default_factory=Absences, init=False)

    async def run(self) -> None:
        """To its end, or until another gateway has it."""
        log.info("batch_taken_over", batch_id=self.own.record.batch_id, state=self.own.record.state)
        try:
            async with asyncio.TaskGroup() as tasks:
                renewing = tasks.create_task(self._renew())
                await self._all()
                renewing.cancel()
        except* LeaseLost:
            log.warning("batch_lost", batch_id=self.own.record.batch_id)
        log.info("batch_left", batch_id=self.own.record.batch_id, state=self.own.record.state)

    async def _all(self) -> None:
        if self.own.record.adoptions > MAX_ADOPTIONS:
            fault = f"{MAX_ADOPTIONS} gateways in a row ended without a line of it done"
            await self._fail(LineFault(code="batch_aborted", message=fault))
            return
        try:
            file = await self._input()
            if self.own.record.state is BatchState.VALIDATING:
                await self._validate(file)
            if self.own.record.state is BatchState.IN_PROGRESS:
                await self._work(file)
            if not self.own.record.state.is_over:
                await self._finalize(file)
        except FileGone as err:
            fault = str(err)
            await self._fail(LineFault(code="file_not_found", message=fault))

    async def _input(self) -> StoredFile:
        record = self.own.record
        file = await patiently(
            lambda: self.parts.files.get(record.input_file_id, tenant=record.tenant)
        )
        if file is None:
            raise FileGone(f"the input file '{record.input_file_id}' is no longer there")
        return file

    async def _validate(self, file: StoredFile) -> None:
        record = self.own.record
        seen = Inspection(
            record.endpoint,
            self.parts.calls.endpoints[record.endpoint].check,
            self.parts.max_lines,
        )
        loop = asyncio.get_running_loop()
        try:
            async for some in self._chunks(file):
                await loop.run_in_executor(self.parts.executor, seen.inspect, some)
                if seen.hopeless:
                    break
        except TooLong as err:
            limit = self.parts.max_line_bytes
            seen.fault("line_too_long", f"expected at most {limit} bytes in a line", err.args[0])
        if not seen.total and not seen.faults:
            seen.fault("empty_file", "the input file holds no request")
        if seen.faults:
            await self._fail(*seen.faults)
            return
        now = self.own.unix_ms()
        await self.own.change(lambda record: _begun(record, seen.total, now))

    async def _fail(self, *faults: LineFault) -> None:
        now = self.own.unix_ms()
        await self.own.change(
            lambda record: msgspec.structs.replace(
                record, state=BatchState.FAILED, failed_unix_ms=now, faults=faults
            )
        )

    async def _chunks(self, file: StoredFile) -> AsyncGenerator[list[tuple[int, bytes]], None]:
        some: list[tuple[int, bytes]] = []
        size = 0
        async with aclosing(self._lines(file)) as every:
            async for number, line in every:
                some.append((number, line))
                size += len(line)
                if size >= _INSPECTED_BYTES:
                    yield some
                    some, size = [], 0
        if some:
            yield some

    async def _lines(self, file: StoredFile) -> AsyncGenerator[tuple[int, bytes], None]:
        content = self.parts.files.patient_content(file)
        async for number, line in lines(content, max_bytes=self.parts.max_line_bytes):
            yield number, line

    async def _work(self, file: StoredFile) -> None:
        """Run every line that has no result, until all have one or the batch is to stop."""
        working = asyncio.create_task(self._every_line(file))
        watching = asyncio.create_task(self._until_stopped())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (working, watching):
                if task.done():
                    task.result()
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.wait({working, watching})

    async def _until_stopped(self) -> None:
        while not self.own.cancelling and self.own.unix_ms() < self.own.record.expires_unix_ms:
            await asyncio.sleep(_LOOK_S)
            with suppress(Transient):
                await self.own.look()

    async def _every_line(self, file: StoredFile) -> None:
        self._completed = self._failed = 0
        places = asyncio.Semaphore(self.parts.in_flight)
        async with asyncio.TaskGroup() as tasks, aclosing(self._lines(file)) as every:
            async for number, data in every:
                await places.acquire()
                tasks.create_task(self._line(number, data, places))

    async def _line(self, number: int, data: bytes, places: asyncio.Semaphore) -> None:
        try:
            key = result_key(self.own.record.batch_id, number)
            kept = await patiently(lambda: self.parts.results.get(key))
            if kept is None:
                result = await self._answer(number, data)
                await patiently(lambda: self._keep(key, result))
                self._done_here += 1
            else:
                result = kept.value
            if result.good:
                self._completed += 1
            else:
                self._failed += 1
        finally:
            places.release()

    async def _answer(self, number: int, data: bytes) -> LineResult:
        line = await self._decoded(data)
        tries, waits = 0, 0
        while True:
            answer = await self.parts.calls.call(self.own.record, number, bytes(line.body))
            tries += answer.status >= 500 and answer.status != 503
            code = None if answer.status == 200 else answer.code
            found = outcome(
                answer.status,
                code,
                tries=tries,
                waited_s=self._away_s(line, code),
                hopeless=answer.hopeless,
            )
            if found is not Outcome.AGAIN:
                break
            waits += 1
            await asyncio.sleep(wait_s(waits, answer.retry_after_s))
        written = answered(
            line.custom_id,
            line_id=f"batch_req_{answer.request_id}",
            status=answer.status,
            request_id=answer.request_id,
            body=answer.body,
        )
        return LineResult(good=found is Outcome.GOOD, data=written)

    def _away_s(self, line: InputLine, code: str | None) -> float:
        """How long the model of a line that was answered with `code` has been away."""
        model = named_model(line)
        if code == MODEL_NOT_FOUND:
            return self._absences.away_s(model, now_s=asyncio.get_running_loop().time())
        self._absences.there(model)
        return 0.0

    async def _decoded(self, data: bytes) -> InputLine:
        if len(data) <= SMALL_BYTES:
            return decode_line(data)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.parts.executor, decode_line, data)

    async def _keep(self, key: str, result: LineResult) -> None:
        if len(result.data) > _MAX_RESULT_BYTES:
            await self.parts.files.put_part(key, result.data)
            result = msgspec.structs.replace(result, data=b"", part=key)
        await self.parts.results.put(key, result, ttl_s=BATCH_RESULT_TTL_S)

    async def _finalize(self, file: StoredFile) -> None:
        expired = self.own.unix_ms() >= self.own.record.expires_unix_ms
        if not self.own.cancelling and not expired:
            now = self.own.unix_ms()
            await self.own.change(lambda record: _finalizing(record, now))
        record = self.own.record
        written = await self.parts.output.write(record, self._lines(file), expired=expired)
        now = self.own.unix_ms()

        def over(record: BatchRecord) -> BatchRecord:
            ended = _ended(record, now, expired=expired)
            return msgspec.structs.replace(
                ended,
                completed=written.good,
                failed=written.bad,
                output_file_id=written.output_file_id,
                error_file_id=written.error_file_id,
            )

        await self.own.change(over)
        await self.parts.output.forget(record, self._lines(file))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self.own.change(self._progress)

    def _progress(self, record: BatchRecord) -> BatchRecord:
        if record.state is not BatchState.IN_PROGRESS:
            return record
        # Who has just taken it over counts the lines anew: what a client saw does not go back.
        return msgspec.structs.replace(
            record,
            completed=max(record.completed, self._completed),
            failed=max(record.failed, self._failed),
            adoptions=0 if self._done_here else record.adoptions,
        )


def _begun(record: BatchRecord, total: int, now_unix_ms: int) -> BatchRecord:
    if record.state is not BatchState.VALIDATING:
        return msgspec.structs.replace(record, total=total)
    return msgspec.structs.replace(
        record, state=BatchState.IN_PROGRESS, total=total, in_progress_unix_ms=now_unix_ms
    )


def _finalizing(record: BatchRecord, now_unix_ms: int) -> BatchRecord:
    if record.state is BatchState.CANCELLING:
        return record
    return msgspec.structs.replace(
        record, state=BatchState.FINALIZING, finalizing_unix_ms=now_unix_ms
    )


def _ended(record: BatchRecord, now_unix_ms: int, *, expired: bool) -> BatchRecord:
    if record.state is BatchState.CANCELLING:
        return msgspec.structs.replace(
            record, state=BatchState.CANCELLED, cancelled_unix_ms=now_unix_ms
        )
    if expired and record.state is not BatchState.FINALIZING:
        return msgspec.structs.replace(
            record, state=BatchState.EXPIRED, expired_unix_ms=now_unix_ms
        )
    return msgspec.structs.replace(
        record, state=BatchState.COMPLETED, completed_unix_ms=now_unix_ms
    )
