"""Who asks: found once per HTTP request or WebSocket, before any route sees it.

The key comes as `Authorization: Bearer <key>`. A browser cannot set that on a WebSocket: there it
may be a subprotocol, `diptych-api-key.<key>` or OpenAI's `openai-insecure-api-key.<key>`, which is
never said back. Never in the query: that stands in logs.
"""

from collections.abc import Awaitable, Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych_gateway.errors import ApiError, Headers
from diptych_gateway.tenancy.callers import Caller
from diptych_gateway.tenancy.keyring import Keyring, unauthenticated
from diptych_policy.access import Right, may

SECRET_PROTOCOLS = ("diptych-api-key.", "openai-insecure-api-key.")
SUBPROTOCOLS = ("diptych", "realtime")
"""What may be said back to a client that offers subprotocols, the first of these that it names."""
_BEARER = b"bearer "

Needs = Callable[[str, str], Right | None]
"""The right that a method and path take; None: none at all."""
Told = Callable[[Caller], Headers]
"""What a caller is told of its limits."""
Denied = Callable[[Caller, str], Awaitable[None]]
"""Hears of a caller that may not, and of the path."""


class Identity:
    """Around the routes: puts the caller into the scope's state, or turns it away.

    Args:
        app: The routes.
        keyring: Knows the keys.
        needs: Which right a path takes.
        told: The headers of an answer to a caller with limits.
        denied: Hears who was refused which path for lack of a right.
    """

    def __init__(
        self, app: ASGIApp, *, keyring: Keyring, needs: Needs, told: Told, denied: Denied
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._needs = needs
        self._told = told
        self._denied = denied

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        right = self._needs(scope.get("method", "GET"), scope["path"])
        state = scope["state"]
        if right is not None:
            keyring = self._keyring
            caller = keyring.anybody if keyring.open else keyring.caller(_key(scope))
            state["caller"], state["tenant"] = caller, caller.tenant
            if not may(caller.role, right):
                await self._turn_away(caller, scope["path"])
            if right is Right.ASK:
                receive = self._judging_again(caller, receive)
                if caller.holders:
                    send = self._telling(caller, send)
        if scope.get("subprotocols") and (chosen := chosen_subprotocol(scope)):
            send = _accepting(chosen, send)
        await self._app(scope, receive, send)

    async def _turn_away(self, caller: Caller, path: str) -> None:
        """Say no, and write down who tried to do what an administrator does."""
        if caller.role is None:
            raise unauthenticated("this takes an API key of a role that may: see docs/security.md")
        await self._denied(caller, path)
        text = f"a key of role '{caller.role}' does not give the right to do this"
        raise ApiError(403, text, code="forbidden")

    def _judging_again(self, caller: Caller, receive: Receive) -> Receive:
        """A body may take minutes to come: what its key is worth by then counts."""

        async def receive_judged() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                self._keyring.renewed(caller)
            return message

        return receive_judged

    def _telling(self, caller: Caller, send: Send) -> Send:
        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._told(caller)]
            await send(message)

        return send_told


def _key(scope: Scope) -> str | None:
    """The key that is shown; None: there is none.

    Raises:
        ApiError: what is shown is no bearer token, or there are two (401).
    """
    shown: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if scope["type"] == "websocket":
        shown += [b"Bearer " + token.encode() for token in _tokens(scope["subprotocols"])]
    if not shown:
        return None
    if len(shown) > 1:
        raise unauthenticated("expected one API key, saw two")
    (value,) = shown
    key = value[len(_BEARER) :].strip()
    if value[: len(_BEARER)].lower() != _BEARER or not key:
        raise unauthenticated("expected 'Authorization: Bearer <key>', saw something else")
    return key.decode("latin-1")


def _tokens(subprotocols: Iterable[str]) -> list[str]:
    return [
        offered.removeprefix(prefix)
        for offered in subprotocols
        for prefix in SECRET_PROTOCOLS
        if offered.startswith(prefix)
    ]


def _accepting(subprotocol: str, send: Send) -> Send:
    async def send_chosen(message: Message) -> None:
        if message["type"] == "websocket.accept":
            message.setdefault("subprotocol", subprotocol)
        await send(message)

    return send_chosen


def chosen_subprotocol(scope: Scope) -> str | None:
    """The subprotocol to say back: one that holds no secret; None: the client offered none of ours.

    A browser whose offer holds only a key needs an answer of its own: it offers `diptych` too.
    """
    offered = scope.get("subprotocols") or ()
    return next((known for known in SUBPROTOCOLS if known in offered), None)
