"""A batch as its client sees it: OpenAI's object."""

from typing import Literal

import msgspec

from diptych_contracts.batches import BatchRecord


class Counts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class Fault(msgspec.Struct):
    code: str
    message: str
    param: str | None
    line: int | None


class Faults(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Fault]


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Faults | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def shown(record: BatchRecord) -> BatchObject:
    """`record` as its client sees it."""
    faults = [Fault(f.code, f.message, f.param, f.line) for f in record.faults]
    return BatchObject(
        id=record.batch_id,
        endpoint=record.endpoint,
        errors=Faults(data=faults) if faults else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.state.value,
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        created_at=record.created_unix_ms // 1000,
        in_progress_at=_s(record.in_progress_unix_ms),
        expires_at=record.expires_unix_ms // 1000,
        finalizing_at=_s(record.finalizing_unix_ms),
        completed_at=_s(record.completed_unix_ms),
        failed_at=_s(record.failed_unix_ms),
        expired_at=_s(record.expired_unix_ms),
        cancelling_at=_s(record.cancelling_unix_ms),
        cancelled_at=_s(record.cancelled_unix_ms),
        request_counts=Counts(record.total, record.completed, record.failed),
        metadata=dict(record.metadata) or None,
    )


def _s(unix_ms: int | None) -> int | None:
    return None if unix_ms is None else unix_ms // 1000
