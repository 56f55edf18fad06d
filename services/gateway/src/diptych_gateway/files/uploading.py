"""`multipart/form-data` on its way in: small fields kept, the one file handed on as it comes."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Message, Receive, Scope

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.errors import ApiError
from diptych_gateway.files.store import ContentWriter
from diptych_gateway.listening.reading import ClientGone, declares_more

logging.getLogger("python_multipart").setLevel(logging.ERROR)
"""A client is told what is wrong with its form; a warning each would fill the log."""

MAX_FIELD_BYTES = 1024
MAX_PARTS = 16
MAX_NAME_CHARS = 255
_OVERHEAD_BYTES = 64 * 1024
"""Of a body, beyond its file."""
_MAX_HEADERS, _MAX_HEADER_BYTES = 8, 4096


@dataclass(slots=True)
class _Part:
    header: bytes = b""
    value: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    filename: str | None = None
    data: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class Form:
    """What a form said, its file's content apart."""

    fields: Mapping[str, str]
    filename: str | None
    """None: there was no file."""


class _Reader:
    """The parser's callbacks: what the file's content is waits in `waiting`."""

    def __init__(self, boundary: bytes) -> None:
        self.waiting: list[bytes] = []
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.done = False
        self._part = _Part()
        self._count = 0
        self._parser = _parser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._all,
            },
        )

    def feed(self, data: bytes) -> None:
        """Take in a piece of the body. Raises `InvalidRequest`."""
        try:
            self._parser.write(data)
        except FormParserError as err:
            raise _malformed(str(err)) from err

    def _begin(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise _malformed(f"expected at most {MAX_PARTS} parts")
        self._part = _Part()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.value += data[start:end]

    def _header_end(self) -> None:
        part = self._part
        part.headers[part.header.lower()] = part.value
        part.header = part.value = b""

    def _headers_finished(self) -> None:
        part = self._part
        disposition, options = parse_options_header(part.headers.get(b"content-disposition"))
        if disposition != b"form-data" or b"name" not in options:
            raise _malformed("expected 'Content-Disposition: form-data' with a name in each part")
        part.name = options[b"name"].decode("utf-8", "replace")[:MAX_NAME_CHARS]
        if part.name in self.fields or (part.name == "file" and self.filename is not None):
            raise InvalidRequest(f"'{part.name}' was given twice", param=part.name)
        if part.name == "file":
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = part.filename = name[-MAX_NAME_CHARS:] or "file"

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.filename is not None:
            self.waiting.append(data[start:end])
            return
        part.data += data[start:end]
        if len(part.data) > MAX_FIELD_BYTES:
            text = f"'{part.name}': expected at most {MAX_FIELD_BYTES} bytes"
            raise InvalidRequest(text, param=part.name)

    def _end(self) -> None:
        if self._part.filename is None:
            self.fields[self._part.name] = self._part.data.decode("utf-8", "replace")

    def _all(self) -> None:
        self.done = True


async def read_form(
    scope: Scope, receive: Receive, writer: ContentWriter, *, max_bytes: int, silence_s: float
) -> Form:
    """A whole form, its file written to `writer`.

    Raises:
        ApiError: not declared as a form (415), too large (413), or its client pauses (408).
        InvalidRequest: it is no form.
        ClientGone: the client left.
        Transient: the bus is away.
    """
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"")
    if declares_more(declared.decode("latin-1"), max_bytes + _OVERHEAD_BYTES):
        raise too_large(max_bytes)
    reader = _Reader(_boundary(headers.get(b"content-type", b"")))
    more, n_bytes = True, 0
    while more:
        message = await _next(receive, silence_s)
        if message["type"] == "http.disconnect":
            raise ClientGone
        body: bytes = message.get("body", b"")
        more, n_bytes = message.get("more_body", False), n_bytes + len(body)
        reader.feed(body)
        for piece in reader.waiting:
            await writer.write(piece)
        reader.waiting.clear()
        if writer.n_bytes > max_bytes or n_bytes > writer.n_bytes + _OVERHEAD_BYTES:
            raise too_large(max_bytes)
    if not reader.done:
        raise _malformed("its end is missing")
    await writer.finish()
    return Form(reader.fields, reader.filename)


def _parser(boundary: bytes, callbacks: Any) -> MultipartParser:
    try:
        return MultipartParser(
            boundary, callbacks, max_header_count=_MAX_HEADERS, max_header_size=_MAX_HEADER_BYTES
        )
    except FormParserError as err:  # a boundary without end
        raise _malformed(str(err)) from err


def too_large(max_bytes: int) -> ApiError:
    """What a client is told whose file is."""
    text = f"'file': expected at most {max_bytes} bytes, saw more"
    return ApiError(413, text, code="file_too_large", param="file")


async def _next(receive: Receive, silence_s: float) -> Message:
    try:
        async with asyncio.timeout(silence_s):
            return await receive()
    except TimeoutError as err:
        text = f"nothing came of the body for {silence_s:g} s"
        raise ApiError(408, text, code="body_timeout") from err


def _boundary(content_type: bytes) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        seen = content_type[:80].decode("latin-1")
        text = f"expected a body of type 'multipart/form-data' with a boundary, saw '{seen}'"
        raise ApiError(415, text, code="unsupported_media_type")
    return options[b"boundary"]


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest(f"expected a body of 'multipart/form-data': {why}", code="invalid_form")
