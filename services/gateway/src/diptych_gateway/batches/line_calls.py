"""A line of a batch, run as a request to its endpoint inside this process."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from diptych_contracts.batches import BatchRecord, result_key
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.ids import new_request_id
from diptych_gateway.batches.lines import Check
from diptych_gateway.errors import ApiError
from diptych_gateway.idempotency.header import LINE
from diptych_gateway.tenancy.callers import Caller
from diptych_telemetry import logger

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a batch may call."""

    app: ASGIApp
    check: Check


class _Seen(msgspec.Struct):
    code: str | None = None


class _ErrorSeen(msgspec.Struct):
    error: _Seen | None = None


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What an endpoint said."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0
    hopeless: bool = False
    """Whether it said that the same again would be answered the same."""

    @property
    def code(self) -> str | None:
        """Of the error object."""
        try:
            seen = msgspec.json.decode(self.body, type=_ErrorSeen).error
        except msgspec.DecodeError:
            return None
        return None if seen is None else seen.code


class LineCalls:
    """Runs lines.

    Args:
        endpoints: What may be called, by path.
        rng: Draws request ids.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint], *, rng: Random) -> None:
        self.endpoints = endpoints
        self._rng = rng

    async def call(self, batch: BatchRecord, number: int, body: bytes) -> LineAnswer:
        """The answer to a line: the same line of the same batch runs once, wherever it is called.

        It comes like any request, but for its key, and waits for its answer however long that
        takes: the request's own deadlines end it.
        """
        request_id = new_request_id(self._rng)
        exchange = _Exchange(body)
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": batch.endpoint,
            "raw_path": batch.endpoint.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "state": {
                "request_id": request_id,
                "tenant": batch.tenant,
                "caller": Caller(tenant=batch.tenant),
                LINE: result_key(batch.batch_id, number),
            },
        }
        try:
            await self.endpoints[batch.endpoint].app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("line_crashed", batch_id=batch.batch_id, line=number)
            error = ApiError(500, "internal error", code="internal_error")
            return LineAnswer(500, request_id, error.body)
        return LineAnswer(
            exchange.status,
            request_id,
            bytes(exchange.body),
            exchange.retry_after_s,
            exchange.hopeless,
        )


class _Exchange:
    """A client that sends a body and waits."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.body = bytearray()
        self.retry_after_s = 0.0
        self.hopeless = False
        self._asked: bytes | None = body

    async def receive(self) -> Message:
        body, self._asked = self._asked, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # it never leaves; whoever waits here is cancelled
        raise AssertionError("unreachable")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: dict[bytes, Any] = dict(message.get("headers", ()))
            self.retry_after_s = float(headers.get(b"retry-after", b"0"))
            self.hopeless = headers.get(b"x-should-retry") == b"false"
        else:
            self.body += message.get("body", b"")


def refusing_streams(check: Callable[[bytes], Any]) -> Check:
    """`check`, and that a body asks for its answer in one piece."""

    def judge(body: bytes) -> None:
        call = check(body)
        for name in ("stream", "background"):
            if getattr(call, name, False):
                raise unfit(name)

    return judge


def unfit(name: str) -> InvalidRequest:
    """What is wrong with a line that wants its answer otherwise."""
    return InvalidRequest(
        f"'body.{name}': expected false in a line of a batch", param=f"body.{name}"
    )
