"""NATS's JSON web tokens: what their issuer says of a key, signed with its own.

Nothing here judges whether the issuer may say so: that is `trust`, and the server.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diptych_contracts.errors import Permanent
from diptych_identity.nkeys import BadKey, KeyPair, verified

_ALGORITHM = "ed25519-nkey"
MAX_TOKEN_BYTES = 1024 * 1024


class BadToken(Permanent):
    """A text that is no token, or whose signature is not its issuer's."""


@dataclass(frozen=True, slots=True)
class Token:
    """What a token says, its signature verified."""

    issuer: str
    """Public key of whoever signed it."""
    subject: str
    """Public key of whom it is about."""
    name: str
    issued_unix_s: int
    expires_unix_s: int
    """0: never."""
    nats: Mapping[str, Any]
    """What is particular to its type."""


def signed(
    subject: str,
    name: str,
    nats: Mapping[str, Any],
    *,
    by: KeyPair,
    issued_unix_s: int,
    expires_unix_s: int = 0,
) -> str:
    """A token about `subject`; an expiry of 0 is none."""
    claims: dict[str, Any] = {
        "iat": issued_unix_s,
        "iss": by.public,
        "name": name,
        "sub": subject,
        "nats": dict(nats),
    }
    if expires_unix_s:
        claims["exp"] = expires_unix_s
    digest = hashlib.sha256(_json(claims)).digest()
    claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
    told = f"{_b64(_json({'typ': 'JWT', 'alg': _ALGORITHM}))}.{_b64(_json(claims))}"
    return f"{told}.{_b64(by.sign(told.encode()))}"


def read(text: str) -> Token:
    """What `text` says, its signature being that of the issuer it names.

    Raises:
        BadToken: it is no token, or somebody else's.
    """
    if len(text) > MAX_TOKEN_BYTES:
        raise BadToken(f"expected a token of at most {MAX_TOKEN_BYTES} bytes, got {len(text)}")
    try:
        head, body, signature = text.strip().split(".")
        header, claims = json.loads(_unb64(head)), json.loads(_unb64(body))
        ours = header["alg"] == _ALGORITHM
        token = _token(claims)
        genuine = ours and verified(token.issuer, _unb64(signature), f"{head}.{body}".encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadKey) as err:
        raise BadToken("expected a NATS token, got something else") from err
    if not genuine:
        raise BadToken(f"a token about {token.name!r} is not signed by the key that it names")
    return token


def _token(claims: Mapping[str, Any]) -> Token:
    return Token(
        issuer=str(claims["iss"]),
        subject=str(claims["sub"]),
        name=str(claims.get("name", "")),
        issued_unix_s=int(claims.get("iat", 0)),
        expires_unix_s=int(claims.get("exp", 0)),
        nats=dict(claims["nats"]),
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
