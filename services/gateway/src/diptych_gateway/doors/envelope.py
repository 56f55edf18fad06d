"""Around every route: a request id on every answer, and an error object for every failure."""

from collections.abc import Callable
from random import Random

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import new_request_id
from diptych_gateway import metrics
from diptych_gateway.answering.delivering import send_error, send_refusal
from diptych_gateway.errors import ApiError, from_error
from diptych_telemetry import logger

_SWITCHING = 101

log = logger(__name__)


class Envelope:
    """The outermost ASGI application.

    Args:
        app: The routes.
        rng: Draws request ids.
        endpoint: What metrics call a path: one of few names.
    """

    def __init__(self, app: ASGIApp, *, rng: Random, endpoint: Callable[[str], str]) -> None:
        self._app = app
        self._rng = rng
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id(self._rng)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["app"] = self  # Starlette's router then raises instead of answering by itself
        endpoint = self._endpoint(scope["path"])
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send, endpoint=endpoint)
            return
        begun = False

        async def send_marked(message: Message) -> None:
            nonlocal begun
            if not begun:
                begun = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
                metrics.answered(endpoint, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except HTTPException as err:
            await send_error(send_marked, _from_http(err, scope))
        except DiptychError as err:
            await send_error(send_marked, from_error(err))
        except Exception:
            log.exception("request_crashed", request_id=request_id, path=endpoint)
            if begun:
                raise
            await send_error(send_marked, ApiError(500, "internal error", code="internal_error"))

    async def _socket(self, scope: Scope, receive: Receive, send: Send, *, endpoint: str) -> None:
        mark = (b"x-request-id", scope["state"]["request_id"].encode())
        begun = False

        async def send_marked(message: Message) -> None:
            nonlocal begun
            if not begun:
                begun = True
                match message["type"]:
                    case "websocket.accept":
                        message["headers"] = [mark]
                        metrics.answered(endpoint, _SWITCHING)
                    case "websocket.http.response.start":
                        message["headers"] = [*message["headers"], mark]
                        metrics.answered(endpoint, message["status"])
                    case "websocket.close":  # the router knows no such path
                        text = f"there is no WebSocket at {scope['path'][:200]}"
                        raise ApiError(404, text, code="not_found")
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except DiptychError as err:  # before it was accepted
            begun = False
            await send_refusal(send_marked, from_error(err))


def _from_http(err: HTTPException, scope: Scope) -> ApiError:
    line = f"{scope['method']} {scope['path'][:200]}"
    match err.status_code:
        case 404:
            text = f"there is nothing at {line}; /docs names every path, most begin with /v1"
            return ApiError(404, text, code="not_found")
        case 405:
            allowed = (err.headers or {}).get("Allow", "")
            text = f"expected {allowed}, saw {line}"
            error = ApiError(405, text, code="method_not_allowed")
            error.more_headers.append((b"allow", allowed.encode()))
            return error
        case status:
            return ApiError(status, str(err.detail))
