"""A real nats-server that knows who is who, with identities for a test to show.

Roles have the rights they have in the product; but `TESTER` may do everything, so that a test sees
and touches what no role does.
"""

import asyncio
import secrets
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diptych_bus.access import Access
from diptych_bus.jetstream import JetStreamBus
from diptych_bus.jetstream.client import IdentifiedClient
from diptych_bus.permissions.granting import ANSWER_S, table
from diptych_bus.server import Guard, NatsServer
from diptych_identity import files
from diptych_identity.authority import Authority
from diptych_identity.claims import Permissions
from diptych_identity.issuing import TTL_S
from diptych_identity.roles import Role
from diptych_testkit.ports import free_port

TESTER = Role.OBSERVER
_ANYTHING = Permissions((">",), (">",), ANSWER_S)
_WAIT_S = 120.0


class GuardedNats:
    """One server, its authority beside it, and its streams made.

    Args:
        folder: For all of it.
        port: 0 takes a free one.
        unbound: The role that may do everything here; None: none.
    """

    def __init__(self, folder: Path, *, port: int = 0, unbound: Role | None = TESTER) -> None:
        self.folder = folder
        rights = table() | ({} if unbound is None else {unbound: _ANYTHING})
        self.authority = Authority.make(folder / "certs", rights)
        files.folder(folder / "identities")
        authority = self.authority
        guard = Guard(
            certificate=authority.path / "server.pem",
            believes=authority.server_conf,
            probe=self.access(Role.SUPERVISOR),
        )
        self.server = NatsServer(folder / "nats", port=port, guard=guard)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self.server.url

    def start(self) -> "GuardedNats":
        """Start it, and create what a supervisor creates; blocks."""
        self.server.start_blocking()
        _run(self._declare())
        return self

    def issue(self, role: Role, name: str = "", *, ttl_s: float = TTL_S) -> Path:
        """A file with a new identity."""
        name = name or f"{role.value}-{secrets.token_hex(6)}"
        identity = self.authority.issuer(role).issue(name, ttl_s=ttl_s)
        path = self.folder / "identities" / f"{name}.creds"
        files.write(path, identity.text())
        return path

    def access(self, role: Role, name: str = "", *, ttl_s: float = TTL_S) -> Access:
        """A new identity, ready to connect."""
        return Access(self.issue(role, name, ttl_s=ttl_s), self.authority.trust)

    async def join(self, role: Role = TESTER, name: str = "", **options: Any) -> JetStreamBus:
        """The bus, as a new process of `role`."""
        return await self.join_from(self.issue(role, name), **options)

    async def join_from(
        self, path: Path, *, wait_s: float = _WAIT_S, **options: Any
    ) -> JetStreamBus:
        """The bus, as who the file at `path` says."""
        access = Access(path, self.authority.trust)
        return await JetStreamBus.connect(
            self.url, name=access.name, wait_s=wait_s, access=access, **options
        )

    async def client(self, role: Role = TESTER, name: str = "", **options: Any) -> IdentifiedClient:
        """A bare client, as a new process of `role`."""
        client = IdentifiedClient(self.access(role, name))
        await client.connect_as(self.url, **{"error_cb": _quiet, **options})
        return client

    def environment(self, service: str) -> dict[str, str]:
        """What one process of `service` must be told to join."""
        own = f"DIPTYCH_{service.upper().replace('-', '_')}__IDENTITY"
        return {
            "DIPTYCH_ALL__NATS_URL": self.url,
            "DIPTYCH_ALL__TRUST": str(self.authority.trust),
            own: str(self.issue(Role(service))),
        }

    def reload(self) -> None:
        """Have the server read its keys again."""
        self.server.reload()

    def violations(self) -> list[str]:
        """What anybody tried that the table does not allow, in the server's words.

        Without answers that come too late: the right to answer ends with the connection that the
        question came on, and who asked asks again.
        """
        log = (self.folder / "nats" / "nats-server.log").read_text(errors="replace")
        late = 'Publish Violation - Subject "_INBOX.'
        return [line for line in log.splitlines() if "Violation" in line and late not in line]

    async def _declare(self) -> None:
        bus = await self.join(Role.SUPERVISOR)
        await bus.close()


@contextmanager
def guarded_nats(folder: Path, *, unbound: Role | None = TESTER) -> Iterator[GuardedNats]:
    """A started one; it is gone afterwards, whatever the test did to it."""
    nats = GuardedNats(folder, port=free_port(), unbound=unbound).start()
    try:
        yield nats
    finally:
        nats.server.stop_blocking()


async def _quiet(_: Exception) -> None:
    """A test looks at what comes, or does not."""


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, whether or not this thread has an event loop."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as err:
            failed.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
