"""Pages of other sites: what their scripts may do here. Nothing, unless their origin is allowed.

A browser asks first (CORS) before it lets another site's script send JSON or read an answer; so
without an answer to that, nothing is possible over HTTP. It does not ask before a WebSocket, nor
before a body without a type: those are refused here.
"""

from collections.abc import Iterable
from random import Random
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_contracts.ids import new_request_id
from diptych_gateway.answering.delivering import send_error, send_refusal
from diptych_gateway.errors import ApiError, Headers

_METHODS = b"GET, POST, DELETE, OPTIONS"
_SHOWN = (
    b"x-request-id, retry-after, x-should-retry, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_MAX_AGE_S = b"600"
_EVERY = "*"


class Origins:
    """Outside of everything else: a browser's question carries no key.

    Args:
        app: What is served.
        allowed: Origins such as `https://chat.example`; `*` allows every one.
        rng: Draws request ids, for answers that nobody else gives.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str], *, rng: Random) -> None:
        self._app = app
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)
        self._rng = rng

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif self._allows(origin):
            await self._shared(scope, receive, send, origin)
        elif _own(origin, headers.get(b"host", b"")):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # websocket.connect
            await send_refusal(send, self._refusal(origin))
        elif scope["method"] not in ("GET", "HEAD", "OPTIONS") and b"content-type" not in headers:
            await send_error(send, self._refusal(origin))
        else:
            await self._app(scope, receive, send)

    def _allows(self, origin: bytes) -> bool:
        return _EVERY in self._allowed or origin.decode("latin-1").lower() in self._allowed

    async def _shared(self, scope: Scope, receive: Receive, send: Send, origin: bytes) -> None:
        """Serve a page of an allowed origin."""
        headers = dict(scope["headers"])
        allow: Headers = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            wanted = headers.get(b"access-control-request-headers", b"")
            head = [
                *allow,
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", _MAX_AGE_S),
                (b"x-request-id", new_request_id(self._rng).encode()),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": head})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_shared(message: Message) -> None:
            if message["type"] == "http.response.start":
                head = [*message["headers"], *allow, (b"access-control-expose-headers", _SHOWN)]
                message = {**message, "headers": head}
            await send(message)

        await self._app(scope, receive, send_shared)

    def _refusal(self, origin: bytes) -> ApiError:
        shown = origin[:80].decode("latin-1")
        text = f"pages of '{shown}' may not be served: it is not among CORS_ORIGINS"
        error = ApiError(403, text, code="origin_not_allowed")
        error.more_headers.append((b"x-request-id", new_request_id(self._rng).encode()))
        return error


def _own(origin: bytes, host: bytes) -> bool:
    """Whether a page came from this very server."""
    return urlsplit(origin.decode("latin-1")).netloc.lower() == host.decode("latin-1").lower()
