"""`diptych batch`: a file of requests, run as a batch of any OpenAI-compatible server."""

import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from diptych_cli.asking import Server
from diptych_cli.failing import CliError

POLL_S = 1.0
_PIECE_BYTES = 1024 * 1024
_OVER = ("completed", "failed", "expired", "cancelled")
_VAIN_LOOKS = 60
"""A server that is started again is away for some seconds."""


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Fault(msgspec.Struct):
    message: str = ""
    line: int | None = None


class Faults(msgspec.Struct):
    data: list[Fault] = []


class Batch(msgspec.Struct):
    id: str
    status: str
    request_counts: Counts = msgspec.field(default_factory=Counts)
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None


class File(msgspec.Struct):
    id: str


class Line(msgspec.Struct):
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Where results go."""

    output: Path | None
    """None: to standard output."""
    errors: Path | None
    """None: only counted."""


def batch(server: Server, what: str, options: BatchOptions) -> int:
    """Run the file `what`, or wait for the batch of that id; 1 if not every request succeeded."""
    batch_id = what if what.startswith("batch_") else _start(server, Path(what))
    try:
        done = _wait(server, batch_id)
    except KeyboardInterrupt:
        _say(f"\nit goes on; its results, later: diptych batch {batch_id}\n")
        raise
    for fault in done.errors.data if done.errors else []:
        _say(f"line {fault.line}: {fault.message}\n")
    if done.output_file_id is not None:
        _download(server, done.output_file_id, options.output)
    if done.error_file_id is not None and options.errors is not None:
        _download(server, done.error_file_id, options.errors)
    return int(done.status != "completed" or done.request_counts.failed > 0)


def _start(server: Server, path: Path) -> str:
    endpoint = _endpoint(path)
    key = secrets.token_hex(16)
    boundary = secrets.token_hex(16)
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()
    headers = {
        "Content-Type": f"multipart/form-data; boundary={boundary}",
        "Content-Length": str(len(head) + path.stat().st_size + len(tail)),
        "Idempotency-Key": key,
    }
    with server.asked("POST", "/files", _pieces(head, path, tail), headers) as answer:
        file = msgspec.json.decode(answer.read(), type=File)
    body = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
    given = {"Content-Type": "application/json", "Idempotency-Key": key}
    with server.asked("POST", "/batches", msgspec.json.encode(body), given) as answer:
        return msgspec.json.decode(answer.read(), type=Batch).id


def _endpoint(path: Path) -> str:
    """What the first line calls: all must call the same, which the server checks."""
    try:
        with path.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
        return msgspec.json.decode(first, type=Line).url
    except OSError as err:
        raise CliError(f"{path}: {err.strerror}") from err
    except msgspec.DecodeError as err:
        example = '{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}'
        raise CliError(f"{path}: expected lines like {example}: {err}") from err


def _pieces(head: bytes, path: Path, tail: bytes) -> Iterator[bytes]:
    yield head
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
    yield tail


def _wait(server: Server, batch_id: str) -> Batch:
    """The batch once it is over; says how far it is."""
    vain = 0
    while True:
        try:
            with server.asked("GET", f"/batches/{batch_id}") as answer:
                found = msgspec.json.decode(answer.read(), type=Batch)
        except CliError:
            vain += 1
            if vain >= _VAIN_LOOKS:
                raise
        else:
            vain = 0
            _say(f"\r{_progress(found)}   ")
            if found.status in _OVER:
                _say("\n")
                return found
        time.sleep(POLL_S)


def _progress(found: Batch) -> str:
    counts = found.request_counts
    failed = f", {counts.failed} failed" if counts.failed else ""
    return f"{found.id} {found.status}: {counts.completed} of {counts.total}{failed}"


def _download(server: Server, file_id: str, path: Path | None) -> None:
    with server.asked("GET", f"/files/{file_id}/content") as answer:
        if path is None:
            _copy(answer, sys.stdout.buffer)
            return
        with path.open("wb") as file:
            _copy(answer, file)


def _copy(answer: BinaryIO, file: BinaryIO) -> None:
    while piece := answer.read(_PIECE_BYTES):
        file.write(piece)
    file.flush()


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
