"""What a process believes: who signs the bus's certificates, and who may say what a process is.

One file holds both: certificates (PEM) of authorities, and the stack's account token, which names
the signing keys of each role and whoever is revoked. It is public, and read again once it changes.
"""

import re
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diptych_contracts.errors import Permanent
from diptych_identity import tokens
from diptych_identity.identity import signed_part
from diptych_identity.nkeys import verified
from diptych_identity.roles import Role

_ACCOUNT = re.compile(r"-----BEGIN NATS ACCOUNT JWT-----\s+(\S+)\s+-----END NATS ACCOUNT JWT-----")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_CACHED = 256
_SKEW_S = 30
"""Clocks of machines differ: a token is still believed for so long."""


class NotTrusted(Permanent):
    """Somebody is not who the message says, or did not say so."""


def text(certificates: str, account_jwt: str) -> str:
    """As a file holds it."""
    label = "NATS ACCOUNT JWT"
    return f"{certificates}-----BEGIN {label}-----\n{account_jwt}\n-----END {label}-----\n"


class Trust:
    """What `path` says, now.

    Args:
        path: The file.
        unix_s: The wall clock.

    Raises:
        NotTrusted: the file is not there, or not what it should be.
    """

    def __init__(self, path: Path, *, unix_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._unix_s = unix_s
        self._stamp: tuple[int, int, int] | None = None
        self._cached: dict[str, tokens.Token] = {}
        self._roles: dict[str, str] = {}
        self._revoked: Mapping[str, Any] = {}
        self._certificates = ""
        self._account = ""
        self.refresh()

    def refresh(self) -> None:
        """Read the file again if it is another one."""
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return
            content = self._path.read_text()
        except (OSError, UnicodeDecodeError) as err:
            raise NotTrusted(f"cannot read what to trust from {self._path}: {err}") from err
        self._take(content)
        self._stamp = stamp

    def tls(self) -> ssl.SSLContext:
        """For a connection to the bus: TLS 1.3, and only a server that this trusts."""
        self.refresh()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self._certificates)
        return context

    def verify(self, name: str, role: Role, jwt: str, signature: bytes, data: bytes) -> None:
        """Believe that process `name`, which is a `role`, signed `data`.

        Raises:
            NotTrusted: it did not, it is none, or it may not speak any more.
        """
        token = self._token(jwt)
        if token.name != name or token.nats.get("type") != "user":
            raise NotTrusted(f"expected the word of {name}, got that of {token.name!r}")
        if self._role(token) != role.value:
            raise NotTrusted(f"{name} is not known as a {role.value}")
        if token.expires_unix_s and self._unix_s() > token.expires_unix_s + _SKEW_S:
            raise NotTrusted(f"the identity of {name} has expired")
        self._check_revoked(token)
        if not verified(token.subject, signature, signed_part(data)):
            raise NotTrusted(f"{name} did not sign this")

    def role(self, jwt: str) -> Role | None:
        """The role whose key signed `jwt`; None if it is nobody's. Raises `NotTrusted`."""
        found = self._role(self._token(jwt))
        return Role(found) if found in {role.value for role in Role} else None

    def _token(self, jwt: str) -> tokens.Token:
        token = self._cached.get(jwt)
        if token is None:
            try:
                token = tokens.read(jwt)
            except tokens.BadToken as err:
                raise NotTrusted(str(err)) from err
            if len(self._cached) >= _CACHED:
                self._cached.clear()
            self._cached[jwt] = token
        return token

    def _role(self, token: tokens.Token) -> str | None:
        self.refresh()
        if token.nats.get("issuer_account") != self._account:
            return None
        return self._roles.get(token.issuer)

    def _check_revoked(self, token: tokens.Token) -> None:
        since = max(int(self._revoked.get(key, 0)) for key in (token.subject, "*"))
        if since and token.issued_unix_s <= since:
            raise NotTrusted(f"the identity of {token.name} is revoked")

    def _take(self, content: str) -> None:
        account = _ACCOUNT.search(content)
        certificates = "".join(_CERTIFICATE.findall(content))
        if account is None or not certificates:
            raise NotTrusted(f"{self._path}: expected certificates and an account token")
        try:
            token = tokens.read(account[1])
            roles = {key["key"]: key["role"] for key in token.nats["signing_keys"]}
        except (Permanent, KeyError, TypeError) as err:
            raise NotTrusted(f"{self._path}: {err}") from err
        self._account, self._roles, self._certificates = token.subject, roles, certificates
        self._revoked = token.nats.get("revocations") or {}
        self._cached.clear()
