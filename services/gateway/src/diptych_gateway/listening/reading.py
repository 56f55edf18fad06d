"""A request's body, read within limits of type, size and time."""

import asyncio
from collections.abc import Callable, Iterable
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.errors import ApiError

JSON = "application/json"
RESUME_HEADER = b"x-diptych-resume"
_LENGTH_DIGITS = 18
"""More than any body has; `int` refuses those of thousands."""

Grown = Callable[[int], None]
"""Hears of the size of a body that is being read, at its beginning and whenever it grows."""


class ClientGone(Exception):
    """The client left before its request was complete; there is nobody to answer."""


def wants_resume(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the client may come back for its answer (`x-diptych-resume: 1`).

    Raises:
        ApiError: the header says something else.
    """
    value = dict(headers).get(RESUME_HEADER, b"0")
    if value in (b"0", b"1"):
        return value == b"1"
    text = f"expected '0' or '1' in the header 'x-diptych-resume', saw {value[:40]!r}"
    raise ApiError(400, text, code="invalid_value", param="x-diptych-resume")


def flag(value: str, name: str) -> bool:
    """What a query's parameter `name` says. Raises `InvalidRequest` if that is no flag."""
    match value.lower():
        case "true":
            return True
        case "false":
            return False
    raise InvalidRequest(f"'{name}': expected true or false, saw {value[:40]!r}", param=name)


def parameters(scope: Scope) -> dict[str, str]:
    """A query by name. Raises `InvalidRequest` for a parameter that was given twice."""
    given, _ = with_list(scope, "")
    return given


def with_list(scope: Scope, listed: str) -> tuple[dict[str, str], list[str]]:
    """A query by name, and the values of `listed`, which clients also write `listed[]`.

    Raises:
        InvalidRequest: another parameter was given twice.
    """
    given: dict[str, str] = {}
    values: list[str] = []
    query: bytes = scope["query_string"]
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if listed and name in (listed, f"{listed}[]"):
            values.append(value)
        elif name in given:
            raise InvalidRequest(f"'{name[:80]}' was given twice", param=name[:80])
        else:
            given[name] = value
    return given, values


def declares_more(length: str, max_bytes: int) -> bool:
    """Whether a `content-length` is a number above `max_bytes`, however long it is."""
    if not (length.isascii() and length.isdecimal()):
        return False
    return len(length.lstrip("0")) > _LENGTH_DIGITS or int(length[-_LENGTH_DIGITS:]) > max_bytes


async def read_json_body(
    headers: Iterable[tuple[bytes, bytes]],
    receive: Receive,
    *,
    max_bytes: int,
    limit: asyncio.Timeout,
    grown: Grown,
) -> bytes:
    """The whole body, within the time `limit`.

    Raises:
        ApiError: not declared as JSON (415), too large (413), or too slow (408).
        ClientGone: the client left.
    """
    known = {name: value.decode("latin-1") for name, value in headers}
    _check_type(known.get(b"content-type"))
    _check_encoding(known.get(b"content-encoding", "identity"))
    declared = known.get(b"content-length", "")
    if declares_more(declared, max_bytes):
        raise _too_large(max_bytes, seen=f"{declared[:20]} bytes")
    try:
        async with limit:
            return await _read(receive, max_bytes, grown)
    except TimeoutError as err:
        text = "the body took too long"
        raise ApiError(408, text, code="body_timeout") from err


async def _read(receive: Receive, max_bytes: int, grown: Grown) -> bytes:
    body = bytearray()
    grown(0)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes, seen="more")
        grown(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int, *, seen: str) -> ApiError:
    text = f"expected a body of at most {max_bytes} bytes, saw {seen}"
    return ApiError(413, text, code="body_too_large")


def _check_type(content_type: str | None) -> None:
    if content_type is None:
        return
    kind, _, rest = content_type.partition(";")
    kind = kind.strip().lower()
    charset = rest.lower().replace('"', "").partition("charset=")[2].strip() or "utf-8"
    if (kind == JSON or kind.endswith("+json")) and charset in ("utf-8", "utf8", "us-ascii"):
        return
    raise ApiError(
        415,
        f"expected a body of type '{JSON}' in UTF-8, saw '{content_type[:80]}'",
        code="unsupported_media_type",
    )


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() != "identity":
        text = f"expected a body that is not compressed, saw '{encoding[:80]}'"
        raise ApiError(415, text, code="unsupported_encoding")
