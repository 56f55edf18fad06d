"""Who asks: found once per HTTP request or WebSocket, before any route sees it."""

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_contracts.keys import DEFAULT_TENANT, Role


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. `scope["state"]["caller"]`; its tenant is `scope["state"]["tenant"]`."""

    tenant: str = DEFAULT_TENANT
    key_id: str = ""
    """Empty: without a key."""
    role: Role = Role.USER


ANONYMOUS = Caller()


class Identity:
    """Around the routes: puts the caller into the scope's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        state["caller"] = caller = ANONYMOUS
        state["tenant"] = caller.tenant
        await self._app(scope, receive, send)
