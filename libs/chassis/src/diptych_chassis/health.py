"""A tiny HTTP/1.1 server for probes: `/health/live`, `/health/ready`, `/metrics`.

Only GET and HEAD, one request per connection, no body. Requests are bounded in size and time, so a
slow or hostile peer holds nothing for long.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_MAX_REQUEST_BYTES = 8192
_TIMEOUT_S = 2.0
_JSON = "application/json"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe gets."""

    status: int
    body: bytes
    content_type: str = _JSON


Page = Callable[[], Answer]


def verdict(ok: bool, **facts: object) -> Answer:
    """200 or 503, with `facts` as a JSON object."""
    return Answer(200 if ok else 503, json.dumps({"ok": ok, **facts}).encode())


class HealthServer:
    """Serves `pages` (path → answer) to probes.

    Args:
        host: Address to bind.
        port: Port to bind; 0 takes a free one, see `port`.
        pages: What each path answers; called in the loop that started the server.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self._host = host
        self._wanted_port = port
        self._pages = pages
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port in use; 0 before `start`."""
        if self._server is None or not self._server.sockets:
            return 0
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(
            self._serve, self._host, self._wanted_port, limit=_MAX_REQUEST_BYTES
        )

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A peer that leaves early is no news.
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                async with asyncio.timeout(2 * _TIMEOUT_S):
                    method, answer = await self._answered(reader)
                    writer.write(_head(answer))
                    writer.write(b"" if method == "HEAD" else answer.body)
                    await writer.drain()
            finally:
                writer.close()

    async def _answered(self, reader: asyncio.StreamReader) -> tuple[str, Answer]:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "", verdict_of(431)
        except asyncio.IncompleteReadError:
            return "", verdict_of(400)
        except TimeoutError:
            return "", verdict_of(408)
        return self._page(head.split(b"\r\n", 1)[0].decode("latin-1"))

    def _page(self, request_line: str) -> tuple[str, Answer]:
        match request_line.split(" "):
            case [method, target, version] if version.startswith("HTTP/1."):
                page = self._pages.get(target.split("?", 1)[0])
            case _:
                return "", verdict_of(400)
        if page is None:
            return method, verdict_of(404)
        if method not in ("GET", "HEAD"):
            return method, verdict_of(405)
        return method, page()


def verdict_of(status: int) -> Answer:
    """An answer that says only its status."""
    return Answer(status, json.dumps({"error": _REASONS[status]}).encode())


def _head(answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
