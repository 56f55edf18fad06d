"""Issuing identities with a role's signing key: all that whoever starts processes needs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from diptych_identity import claims, tokens
from diptych_identity.identity import BadIdentity, Identity, is_name
from diptych_identity.nkeys import KeyPair, Kind, is_public

TTL_S = 24 * 3600.0
"""How long an identity is believed that its issuer renews."""


@dataclass(frozen=True, slots=True)
class Issuer:
    """A role's signing key."""

    account: str
    """Public key of the account."""
    key: KeyPair
    unix_s: Callable[[], float] = time.time

    @classmethod
    def of_text(cls, text: str) -> "Issuer":
        """What `text` gave. Raises `BadIdentity` or `BadKey`."""
        account, _, seed = text.strip().partition("\n")
        if not is_public(account, Kind.ACCOUNT):
            raise BadIdentity("expected a role's signing key (an account and a seed)")
        return cls(account, KeyPair.of_seed(seed.strip(), Kind.ACCOUNT))

    @property
    def text(self) -> str:
        """As a file holds it: a secret."""
        return f"{self.account}\n{self.key.seed}\n"

    def issue(self, name: str, *, ttl_s: float = TTL_S) -> Identity:
        """An identity for the process `name`, with a key of its own."""
        return self._signed(name, KeyPair.new(Kind.USER), ttl_s)

    def renew(self, identity: Identity, *, ttl_s: float = TTL_S) -> Identity:
        """The same one for longer: whoever is revoked stays so, by its key."""
        return self._signed(identity.name, identity.key, ttl_s)

    def _signed(self, name: str, key: KeyPair, ttl_s: float) -> Identity:
        if not is_name(name):
            raise BadIdentity(f"expected a name of letters, digits, - and _, got {name!r}")
        now_s = int(self.unix_s())
        token = tokens.signed(
            key.public,
            name,
            claims.user(self.account),
            by=self.key,
            issued_unix_s=now_s,
            expires_unix_s=now_s + max(1, round(ttl_s)),
        )
        return Identity.of(token, key)
