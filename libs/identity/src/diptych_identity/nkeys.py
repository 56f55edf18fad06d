"""NATS keys: Ed25519, written as base32 text whose first letter says what the key is for.

A public key is `prefix byte + 32 bytes + CRC-16`; a seed has two prefix bytes, `S` and the kind.
"""

import base64
import binascii
from enum import IntEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from diptych_contracts.errors import Permanent

_SEED = 18 << 3
_KEY_BYTES = 32
_CRC_BYTES = 2


class Kind(IntEnum):
    """What a key is for; the value is its prefix byte."""

    OPERATOR = 14 << 3
    ACCOUNT = 0
    USER = 20 << 3


class BadKey(Permanent):
    """A text that is no key, or not one of the kind that is needed."""


class KeyPair:
    """A private key and its public one.

    Args:
        kind: What it is for.
        private: The key itself.
    """

    def __init__(self, kind: Kind, private: Ed25519PrivateKey) -> None:
        self._private = private
        self._kind = kind
        self.public = _text(bytes([kind]) + private.public_key().public_bytes_raw())
        """As others name it."""

    @classmethod
    def new(cls, kind: Kind) -> "KeyPair":
        """A key nobody has had before."""
        return cls(kind, Ed25519PrivateKey.generate())

    @classmethod
    def of_seed(cls, text: str, kind: Kind) -> "KeyPair":
        """The key that `seed` gave. Raises `BadKey`."""
        raw = _raw(text, 2 + _KEY_BYTES)
        found = (raw[0] & 7) << 5 | raw[1] >> 3
        if raw[0] & 0xF8 != _SEED or found != kind:
            raise BadKey(f"expected the seed of a key for {kind.name.lower()}s, got another kind")
        return cls(kind, Ed25519PrivateKey.from_private_bytes(raw[2:]))

    @property
    def seed(self) -> str:
        """The private key as text: a secret."""
        head = bytes([_SEED | self._kind >> 5, (self._kind & 31) << 3])
        return _text(head + self._private.private_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """Its signature (64 bytes)."""
        return self._private.sign(data)

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


def verified(public: str, signature: bytes, data: bytes) -> bool:
    """Whether the holder of `public` signed `data`. Raises `BadKey` if `public` is no key."""
    key = Ed25519PublicKey.from_public_bytes(_raw(public, 1 + _KEY_BYTES)[1:])
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def is_public(text: str, kind: Kind) -> bool:
    """Whether `text` is a public key of `kind`."""
    try:
        return _raw(text, 1 + _KEY_BYTES)[0] == kind
    except BadKey:
        return False


def _text(raw: bytes) -> str:
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(_CRC_BYTES, "little")
    return base64.b32encode(checked).decode().rstrip("=")


def _raw(text: str, length: int) -> bytes:
    """The bytes behind `text`, without prefix letters being judged."""
    try:
        data = base64.b32decode(text + "=" * (-len(text) % 8))
    except (ValueError, binascii.Error) as err:
        raise BadKey("expected a NATS key in base32, got something else") from err
    raw, checksum = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
    if len(raw) != length or binascii.crc_hqx(raw, 0).to_bytes(_CRC_BYTES, "little") != checksum:
        raise BadKey("expected a NATS key, got a text of another length or with a wrong checksum")
    return raw
