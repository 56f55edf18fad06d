"""The folder from which all trust in a stack comes: its authority, operator, account, role keys.

    ca.pem, ca.key            signs the bus server's certificate
    server.pem, server.key    the bus server's
    operator.seed             signs the account; needed for changes only (operator.jwt, system.*)
    account.seed              the account's own key
    roles/<role>.key          signs the identities of a role: for whoever starts its processes
    roles/<role>.old          the key before it, believed until `retire`
    revoked.json              public keys of who may not come any more, and since when
    server.conf               what the server believes, in its own words
    trust.pem                 what everybody else believes (public)
    operator.creds            the identity of a person at the command line

Every change writes `server.conf` and `trust.pem` anew; the server takes it at SIGHUP.
"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from diptych_contracts.errors import Permanent
from diptych_identity import certificates, claims, files, tokens, trust
from diptych_identity.claims import Permissions, Scope
from diptych_identity.identity import Identity
from diptych_identity.issuing import Issuer
from diptych_identity.nkeys import KeyPair, Kind
from diptych_identity.roles import Role

LOOPBACK = ("localhost", "127.0.0.1", "::1")
TRUST, SERVER_CONF, OPERATOR_CREDS = "trust.pem", "server.conf", "operator.creds"
OPERATOR_TTL_S = 30 * 24 * 3600.0
Table = Mapping[Role, Permissions]


class Authority:
    """The folder `path`; made by `make` or `opened`.

    Args:
        path: The folder.
        table: What each role may do: written anew by every change, so it follows the code.
    """

    def __init__(self, path: Path, table: Table) -> None:
        self.path = path
        self._table = table

    @classmethod
    def make(cls, path: Path, table: Table, *, hosts: Iterable[str] = LOOPBACK) -> "Authority":
        """A new one in an empty folder, for a server at `hosts`.

        Raises:
            Permanent: there is one already.
        """
        files.folder(path)
        if (path / "ca.key").exists():
            raise Permanent(f"{path} has keys already: rotate them, or choose another folder")
        self = cls(path, table)
        pair = certificates.authority("diptych development authority")
        files.write(path / "operator.seed", KeyPair.new(Kind.OPERATOR).seed)
        files.write(path / "account.seed", KeyPair.new(Kind.ACCOUNT).seed)
        files.write(path / "system.seed", KeyPair.new(Kind.ACCOUNT).seed)
        self._write_operator()
        files.folder(path / "roles")
        for role in table:
            self._write_issuer(role)
        files.write(path / "ca.pem", pair.certificate, mode=files.PUBLIC)
        files.write(path / "ca.key", pair.key)
        self.renew_server(hosts)
        self.write()
        return self

    @classmethod
    def opened(cls, path: Path, table: Table, *, hosts: Iterable[str] = LOOPBACK) -> "Authority":
        """The one in the folder, or a new one; its certificate and permissions are of today."""
        if not (path / "ca.key").exists():
            return cls.make(path, table, hosts=hosts)
        self = cls(path, table)
        for role in table:
            if not self._key_file(role).exists():
                self._write_issuer(role)
        self.renew_server(hosts)
        self.write()
        return self

    @property
    def trust(self) -> Path:
        """What processes believe."""
        return self.path / TRUST

    @property
    def server_conf(self) -> Path:
        """What the server believes."""
        return self.path / SERVER_CONF

    @property
    def operator(self) -> Path:
        """The identity of a person at the command line."""
        return self.path / OPERATOR_CREDS

    def issuer(self, role: Role) -> Issuer:
        """What issues identities of `role`."""
        return Issuer.of_text(self._key_file(role).read_text())

    def issue_operator(self, *, ttl_s: float = OPERATOR_TTL_S) -> Path:
        """The command line's identity, anew."""
        identity = self.issuer(Role.OPERATOR).issue("operator", ttl_s=ttl_s)
        files.write(self.operator, identity.text())
        return self.operator

    def renew_server(self, hosts: Iterable[str]) -> None:
        """A new certificate for the server."""
        by = certificates.Pair(
            (self.path / "ca.pem").read_text(), (self.path / "ca.key").read_text()
        )
        pair = certificates.server(by, hosts)
        # Both in one file: a server that reloads never sees the halves of two.
        files.write(self.path / "server.pem", pair.certificate + pair.key)

    def rotate(self, role: Role) -> None:
        """A new signing key; identities by the old one are believed until `retire`."""
        files.write(self._key_file(role, "old"), self._key_file(role).read_text())
        self._write_issuer(role)
        self.write()

    def retire(self, role: Role) -> None:
        """Believe no identity by the key before the last `rotate`."""
        self._key_file(role, "old").unlink(missing_ok=True)
        self.write()

    def revoke(self, public: str, *, unix_s: float | None = None) -> None:
        """Believe the key `public` no more."""
        revoked = self._revoked() | {public: int(time.time() if unix_s is None else unix_s)}
        files.write(self.path / "revoked.json", json.dumps(revoked))
        self.write()

    def revoke_identity(self, identity: Identity) -> None:
        """Believe `identity` no more, nor what is renewed of it."""
        self.revoke(identity.key.public, unix_s=2**31)

    def write(self) -> None:
        """What server and processes believe, as it is now."""
        account = self._account_jwt()
        certificate = (self.path / "ca.pem").read_text()
        files.write(self.trust, trust.text(certificate, account), mode=files.PUBLIC)
        files.write(self.server_conf, self._server_text(account))

    def _server_text(self, account: str) -> str:
        system = self._pair("system", Kind.ACCOUNT).public
        return (
            f"operator: {(self.path / 'operator.jwt').read_text()}\n"
            f"system_account: {system}\n"
            "resolver: MEMORY\n"
            "resolver_preload: {\n"
            f"  {self._pair('account', Kind.ACCOUNT).public}: {account}\n"
            f"  {system}: {(self.path / 'system.jwt').read_text()}\n"
            "}\n"
        )

    def _write_operator(self) -> None:
        """Once and for all: a server refuses to reload with another operator token."""
        operator, system = self._pair("operator", Kind.OPERATOR), self._pair("system", Kind.ACCOUNT)
        now_s = int(time.time())
        for key, name, told in (
            (operator, "operator", claims.operator(system.public)),
            (system, "system", claims.account((), revoked={}, jetstream=False)),
        ):
            token = tokens.signed(key.public, name, told, by=operator, issued_unix_s=now_s)
            files.write(self.path / f"{name}.jwt", token)

    def _account_jwt(self) -> str:
        scopes = [
            Scope(role, Issuer.of_text(path.read_text()).key.public, permissions)
            for role, permissions in self._table.items()
            for path in (self._key_file(role), self._key_file(role, "old"))
            if path.exists()
        ]
        return tokens.signed(
            self._pair("account", Kind.ACCOUNT).public,
            "diptych",
            claims.account(scopes, revoked=self._revoked()),
            by=self._pair("operator", Kind.OPERATOR),
            issued_unix_s=int(time.time()),
        )

    def _pair(self, name: str, kind: Kind) -> KeyPair:
        return KeyPair.of_seed((self.path / f"{name}.seed").read_text(), kind)

    def _revoked(self) -> dict[str, int]:
        path = self.path / "revoked.json"
        found: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def _key_file(self, role: Role, which: str = "key") -> Path:
        return self.path / "roles" / f"{role.value}.{which}"

    def _write_issuer(self, role: Role) -> None:
        account = self._pair("account", Kind.ACCOUNT).public
        files.write(self._key_file(role), Issuer(account, KeyPair.new(Kind.ACCOUNT)).text)
