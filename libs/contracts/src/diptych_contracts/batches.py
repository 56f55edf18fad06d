"""Files and batches, as buckets `files`, `batches` and `batch-results` keep them.

A file's content is cut into objects of at most `FILE_PART_BYTES`, so nobody ever holds a whole one.
"""

from enum import StrEnum

from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import Message

FILE_PART_BYTES = 1024 * 1024
MAX_LINE_ERRORS = 100
"""Faults of an input file that are told."""


class StoredFile(Message, frozen=True, kw_only=True, tag="stored_file.1"):
    """A file: its content is objects `<content>.0`, `<content>.1`, … of bucket `file-parts`."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    n_bytes: int
    n_parts: int
    content: str
    digest: str
    """SHA-256 of the content, in hex."""
    created_unix_ms: int
    expires_unix_ms: int

    def part(self, number: int) -> str:
        """The name of a part of its content."""
        return part_name(self.content, number)


def part_name(content: str, number: int) -> str:
    """The object that holds a part of a file's content."""
    return f"{content}.{number}"


class BatchState(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether nothing happens to it any more."""
        return self in (
            BatchState.COMPLETED,
            BatchState.FAILED,
            BatchState.EXPIRED,
            BatchState.CANCELLED,
        )


class LineFault(Message, frozen=True, kw_only=True, tag="line_fault.1"):
    """What is wrong with an input file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """From 1."""


class BatchRecord(Message, frozen=True, kw_only=True, tag="batch_record.1"):
    """The truth about a batch: bucket `batches`, key = batch id.

    Written by the gateway that runs it, by compare-and-swap; another may only set `cancelling`, or
    take it over once `owned_until_unix_ms` has passed.
    """

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    metadata: tuple[tuple[str, str], ...] = ()
    digest: str = ""
    """SHA-256 of the body that created it, in hex."""
    state: BatchState = BatchState.VALIDATING
    owner: Incarnation | None = None
    owned_until_unix_ms: int = 0
    """By the server's clock."""
    adoptions: int = 0
    """In a row, without a line done between them."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    faults: tuple[LineFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_unix_ms: int
    expires_unix_ms: int
    in_progress_unix_ms: int | None = None
    finalizing_unix_ms: int | None = None
    completed_unix_ms: int | None = None
    failed_unix_ms: int | None = None
    expired_unix_ms: int | None = None
    cancelling_unix_ms: int | None = None
    cancelled_unix_ms: int | None = None


class LineResult(Message, frozen=True, kw_only=True, tag="line_result.1"):
    """What a line of a batch came to: bucket `batch-results`, key `<batch id>.<line>`."""

    good: bool
    """Whether it belongs into the output file; else into the error file."""
    data: bytes
    """The line as it stands there, without its end; empty if it is an object."""
    part: str = ""
    """The object of `file-parts` that holds a long one."""


def result_key(batch_id: str, line: int) -> str:
    """Where the result of a line stands."""
    return f"{batch_id}.{line}"
