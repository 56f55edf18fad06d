"""What a process shows the bus, and what it believes of it: two files, read at each connection."""

import ssl
from pathlib import Path

from diptych_contracts.ids import Incarnation
from diptych_identity import identity
from diptych_identity.identity import BadIdentity, Identity
from diptych_identity.roles import Role
from diptych_identity.trust import Trust


class Access:
    """The identity and the trust of one process.

    Args:
        identity_file: Renewed by whoever issued it.
        trust_file: Replaced when keys are rotated.

    Raises:
        BadIdentity: one of them is not there or not what it should be.
        NotTrusted: as above.
    """

    def __init__(self, identity_file: Path, trust_file: Path) -> None:
        self._path = identity_file
        self._trust_file = trust_file
        self.trust = Trust(trust_file)
        self.identity = identity.read(identity_file)
        role = self.trust.role(self.identity.jwt)
        if role is None:
            raise BadIdentity(f"{identity_file} was issued by nobody that {trust_file} names")
        self.role: Role = role

    @property
    def name(self) -> Incarnation:
        """Who the process is on the bus."""
        return Incarnation(self.identity.name)

    def another(self) -> "Access":
        """The same, for another thread's connection."""
        return Access(self._path, self._trust_file)

    @property
    def inbox_prefix(self) -> str:
        """Before the subjects on which only this process hears."""
        return f"_INBOX.{self.name}"

    def tls(self) -> ssl.SSLContext:
        """For one connection."""
        return self.trust.tls()

    def renewed(self) -> Identity:
        """The identity as the file has it now. Raises `BadIdentity` if it is another process's."""
        fresh = identity.read(self._path)
        if fresh.name != self.identity.name:
            raise BadIdentity(f"{self._path} has become that of {fresh.name}")
        self.identity = fresh
        return fresh
