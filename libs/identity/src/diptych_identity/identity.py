"""A process's identity: its key, and its role's word that it is who it says.

The file is NATS's own credentials format, so the `nats` tool reads it too. Whoever issued it may
renew it at any time; it is read again at each connection to the bus.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from diptych_contracts.errors import Permanent
from diptych_identity import tokens
from diptych_identity.nkeys import KeyPair, Kind

_SIGNED = b"diptych.signed.1\n"
"""Before all that is signed here: a server's challenge never begins like this, so that neither
signature can stand for the other."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_BLOCK = re.compile(r"-----BEGIN ([A-Z ]+)-----\s+(\S+)\s+-----+END \1-----", re.DOTALL)
_TOKEN, _SEED = "NATS USER JWT", "USER NKEY SEED"


class BadIdentity(Permanent):
    """A file that is no identity, or one that others may read."""


def is_name(name: str) -> bool:
    """Whether `name` can stand in subjects as one token."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is."""

    name: str
    """Its incarnation."""
    jwt: str
    expires_unix_s: int
    """0: never."""
    key: KeyPair

    @classmethod
    def of(cls, jwt: str, key: KeyPair) -> "Identity":
        """What `jwt` says of `key`. Raises `BadIdentity`."""
        token = tokens.read(jwt)
        if token.nats.get("type") != "user" or token.subject != key.public:
            raise BadIdentity(f"the token about {token.name!r} is not about this key")
        if not is_name(token.name):
            raise BadIdentity(f"expected a name of letters, digits, - and _, got {token.name!r}")
        return cls(token.name, jwt, token.expires_unix_s, key)

    def sign(self, data: bytes) -> bytes:
        """Its signature of `data` (64 bytes); `Trust.verify` is the other half."""
        return self.key.sign(_SIGNED + data)

    def answer(self, challenge: str) -> bytes:
        """The signature that the server asks for. Raises `BadIdentity` if it asks for more."""
        data = challenge.encode()
        if data.startswith(_SIGNED):
            raise BadIdentity("the server asked for a signature that is not its to ask for")
        return self.key.sign(data)

    def text(self) -> str:
        """As a file holds it: a secret."""
        return "".join(
            f"-----BEGIN {label}-----\n{body}\n------END {label}------\n\n"
            for label, body in ((_TOKEN, self.jwt), (_SEED, self.key.seed))
        )


def signed_part(data: bytes) -> bytes:
    """What is really signed when `data` is."""
    return _SIGNED + data


def parse(text: str) -> Identity:
    """The identity in `text`. Raises `BadIdentity`, `BadKey` or `BadToken`."""
    blocks = dict(_BLOCK.findall(text))
    if _TOKEN not in blocks or _SEED not in blocks:
        raise BadIdentity("expected an identity (a token and a seed), got something else")
    return Identity.of(blocks[_TOKEN], KeyPair.of_seed(blocks[_SEED], Kind.USER))


def read(path: Path) -> Identity:
    """The identity in the file `path`.

    Raises:
        BadIdentity: it is not there, none, or others may read it.
    """
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(tokens.MAX_TOKEN_BYTES)
    except (OSError, UnicodeDecodeError) as err:
        raise BadIdentity(f"cannot read the identity {path}: {err}") from err
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadIdentity(f"{path} can be read by others: expected mode 0600")
    try:
        return parse(text)
    except Permanent as err:
        raise BadIdentity(f"{path}: {err}") from err
