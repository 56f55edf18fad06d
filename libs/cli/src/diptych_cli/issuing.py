"""Identities for the processes of a stack: each life of each gets one, renewed while it lives."""

from pathlib import Path
from random import SystemRandom

from diptych_bus.access import Access
from diptych_bus.permissions.granting import table
from diptych_bus.server import Guard
from diptych_contracts.ids import Incarnation, new_incarnation
from diptych_identity import files, identity
from diptych_identity.authority import Authority
from diptych_identity.issuing import TTL_S
from diptych_identity.roles import Role

FOLDER = "certs"
"""Within the folder of a stack."""
RENEW_EVERY_S = TTL_S / 4


def authority(store: Path) -> Authority:
    """The keys of the stack in the folder `store`, made if there are none."""
    return Authority.opened(store / FOLDER, table())


class Issuing:
    """Whoever starts processes holds this.

    Args:
        keys: Of the stack.
        me: The supervisor's name.
    """

    def __init__(self, keys: Authority, me: Incarnation) -> None:
        self._keys = keys
        self._folder = files.folder(keys.path / "identities")
        for left in self._folder.glob("*.creds"):
            left.unlink()  # of processes of a stack that was killed
        self._held: dict[Path, Role] = {}
        self._believed = self._stamp()
        self.access = Access(self._issue(Role.SUPERVISOR, me), keys.trust)
        """The supervisor's own."""
        keys.issue_operator()

    @property
    def guard(self) -> Guard:
        """For the stack's server."""
        return Guard(self._keys.path / "server.pem", self._keys.server_conf, self.access)

    @property
    def operator(self) -> Access:
        """Of whoever runs the stack."""
        return Access(self._keys.operator, self._keys.trust)

    def issue(self, service: str) -> Path:
        """The identity of a new process of `service`."""
        role = Role(service)
        return self._issue(role, new_incarnation(service, SystemRandom()))

    def withdraw(self, path: Path) -> None:
        """Its process has ended."""
        self._held.pop(path, None)
        path.unlink(missing_ok=True)

    def renew(self) -> None:
        """Each for another day, by the keys of now."""
        for path, role in self._held.items():
            fresh = self._keys.issuer(role).renew(identity.read(path))
            files.write(path, fresh.text())
        self._keys.issue_operator()

    def rotated(self) -> bool:
        """Whether the server must read again what it believes, since this was last asked."""
        before, self._believed = self._believed, self._stamp()
        return before != self._believed

    def _issue(self, role: Role, name: Incarnation) -> Path:
        path = self._folder / f"{name}.creds"
        files.write(path, self._keys.issuer(role).issue(name).text())
        self._held[path] = role
        return path

    def _stamp(self) -> tuple[int, ...]:
        paths = (self._keys.server_conf, self._keys.path / "server.pem")
        return tuple(path.stat().st_mtime_ns for path in paths)
