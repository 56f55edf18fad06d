"""`/v1/files`: upload, list, retrieve, content, delete."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Literal

import msgspec
from starlette.types import Message, Receive, Scope, Send

from diptych_contracts.batches import StoredFile
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.ids import new_request_id
from diptych_contracts.streams import FILE_TTL_S
from diptych_gateway.answering.delivering import send_json
from diptych_gateway.errors import ApiError
from diptych_gateway.files.paging import page, paging
from diptych_gateway.files.store import ContentWriter, FileStore
from diptych_gateway.files.uploading import Form, read_form
from diptych_gateway.idempotency.header import in_use, key_of

PREFIX = "file-"
PURPOSES = ("batch",)
_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
_MIN_TTL_S = 3600


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


@dataclass(slots=True, kw_only=True)
class Files:
    """The handlers of files.

    Holds 1 MiB and what a client sends at once for each upload, 1 MiB for each download, so their
    numbers are limited.
    """

    store: FileStore
    rng: Random
    unix_ms: Callable[[], int]
    max_bytes: int
    silence_s: float
    max_uploads: int
    max_downloads: int
    slow_reader_s: float
    max_files: int
    """Of a tenant."""
    max_stored_bytes: int
    """Of all its files."""
    _uploads: int = 0
    _downloads: int = 0

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/files`."""
        tenant: str = scope["state"]["tenant"]
        if self._uploads >= self.max_uploads:
            text = f"{self.max_uploads} files are being uploaded here, the limit"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=1.0)
        self._check_room(tenant)
        content = new_request_id(self.rng)
        writer, kept = self.store.writer(content), False
        file_id = PREFIX + once_or(key_of(scope), tenant, content)
        self._uploads += 1
        try:
            form = await read_form(
                scope, receive, writer, max_bytes=self.max_bytes, silence_s=self.silence_s
            )
            made = self._file(form, writer, file_id=file_id, tenant=tenant)
            file = await self.store.create(made)
            kept = file.content == writer.content
            if file.digest != made.digest:
                raise in_use()
        finally:
            self._uploads -= 1
            if not kept:
                await writer.drop()
        await _send(send, shown(file))

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/files`."""
        asked = paging(scope, most=10_000, usual=10_000, more=("purpose", "order"))
        found = self.store.of(scope["state"]["tenant"])
        if purpose := asked.more.get("purpose"):
            found = [file for file in found if file.purpose == purpose]
        match asked.more.get("order", "desc"):
            case "asc":
                found.reverse()
            case "desc":
                pass
            case other:
                text = f"'order': expected asc or desc, saw {other[:40]!r}"
                raise InvalidRequest(text, param="order")
        chosen, has_more = page(found, asked, name=lambda file: file.file_id)
        data = [shown(file) for file in chosen]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        await _send(send, FileList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/files/{id}`."""
        await _send(send, shown(await self._found(scope)))

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`DELETE /v1/files/{id}`."""
        file = await self._found(scope)
        await self.store.delete(file)
        await _send(send, DeletedFile(id=file.file_id))

    async def content(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/files/{id}/content`, part by part; who does not read is cut off."""
        if self._downloads >= self.max_downloads:
            text = f"{self.max_downloads} files are being read here, the limit"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=1.0)
        self._downloads += 1
        try:
            await self._content(await self._found(scope), scope, send)
        finally:
            self._downloads -= 1

    async def _content(self, file: StoredFile, scope: Scope, send: Send) -> None:
        head = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(file.n_bytes).encode()),
        ]
        start: Message = {"type": "http.response.start", "status": 200, "headers": head}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        begun = False
        try:
            async for part in self.store.content(file):
                if not begun:
                    begun = True
                    await send(start)
                async with asyncio.timeout(self.slow_reader_s):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            if not begun:
                await send(start)
            async with asyncio.timeout(self.slow_reader_s):
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            if abort := scope["state"].get("abort"):
                abort()

    async def _found(self, scope: Scope) -> StoredFile:
        wanted: str = scope["path_params"]["file_id"]
        file = None
        if is_id(wanted, PREFIX):
            file = await self.store.get(wanted, tenant=scope["state"]["tenant"])
        if file is None:
            raise no_file(wanted)
        return file

    def _check_room(self, tenant: str) -> None:
        files = self.store.of(tenant)
        n_bytes = sum(file.n_bytes for file in files)
        if len(files) >= self.max_files or n_bytes >= self.max_stored_bytes:
            text = (
                f"there are {len(files)} files of {n_bytes} bytes; the limits are "
                f"{self.max_files} and {self.max_stored_bytes}: delete some"
            )
            raise ApiError(400, text, code="too_many_files", param="file")

    def _file(self, form: Form, writer: ContentWriter, *, file_id: str, tenant: str) -> StoredFile:
        purpose = _purpose(form)
        now = self.unix_ms()
        return StoredFile(
            file_id=file_id,
            tenant=tenant,
            filename=form.filename or "file",
            purpose=purpose,
            n_bytes=writer.n_bytes,
            n_parts=writer.n_parts,
            content=writer.content,
            digest=writer.digest,
            created_unix_ms=now,
            expires_unix_ms=now + _ttl_s(form) * 1000,
        )


def shown(file: StoredFile) -> FileObject:
    """A file as its client sees it."""
    return FileObject(
        id=file.file_id,
        bytes=file.n_bytes,
        created_at=file.created_unix_ms // 1000,
        expires_at=file.expires_unix_ms // 1000,
        filename=file.filename,
        purpose=file.purpose,
    )


def once_or(key: str | None, tenant: str, fresh: str) -> str:
    """An id's digits: of the idempotency key if there is one, so that the same key is the same."""
    if key is None:
        return fresh
    return sha256(f"{tenant}\0{key}".encode()).hexdigest()[:32]


def is_id(wanted: str, prefix: str) -> bool:
    """Whether `wanted` may be an id of that kind."""
    digits = wanted.removeprefix(prefix)
    return wanted.startswith(prefix) and len(digits) == 32 and digits.isalnum() and digits.isascii()


def no_file(wanted: str, param: str = "file_id") -> ApiError:
    """What a client is told who asks for none of its files."""
    text = f"there is no file '{wanted[:80]}' (any more)"
    return ApiError(404, text, code="file_not_found", param=param)


def _purpose(form: Form) -> str:
    if unknown := form.fields.keys() - _FIELDS:
        name = min(unknown)
        raise InvalidRequest(f"unknown parameter '{name}'", param=name, code="unknown_parameter")
    if form.filename is None:
        text = "'file' is required and was not given"
        raise InvalidRequest(text, param="file", code="missing_required_parameter")
    purpose = form.fields.get("purpose")
    if purpose not in PURPOSES:
        text = f"'purpose': expected {' or '.join(map(repr, PURPOSES))}, saw {purpose!r}"
        raise InvalidRequest(text, param="purpose")
    return purpose


def _ttl_s(form: Form) -> int:
    anchor = form.fields.get("expires_after[anchor]")
    asked = form.fields.get("expires_after[seconds]")
    if anchor is None and asked is None:
        return int(FILE_TTL_S)
    if anchor != "created_at":
        text = f"'expires_after[anchor]': expected 'created_at', saw {anchor!r}"
        raise InvalidRequest(text, param="expires_after[anchor]")
    if asked is None or not (asked.isdecimal() and _MIN_TTL_S <= int(asked) <= FILE_TTL_S):
        text = f"'expires_after[seconds]': expected {_MIN_TTL_S} to {FILE_TTL_S:.0f}, saw {asked!r}"
        raise InvalidRequest(text, param="expires_after[seconds]")
    return int(asked)


async def _send(send: Send, value: msgspec.Struct) -> None:
    await send_json(send, 200, msgspec.json.encode(value))
