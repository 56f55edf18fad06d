"""An entry as a tier holds it: a head that says which block it is, and the block.

    0   4  magic `DKVE`
    4   1  version, 1
    5   1  flags: 1 sealed
    6   2  bytes of the head, 80
    8   8  bytes of the body
    16 16  tenant tag
    32 32  block
    64 16  xxh3-128 over all of the head before this, and the body
    80     the body: the block; sealed: nonce (12), AES-256-GCM of the block, tag (16)

Little-endian. The checksum finds what a disk or a network altered; who alters on purpose can make
another. The seal stops those: its key is the fleet's, of which each tenant has a key derived (so
that no key seals more than one tenant's blocks, each under 96 random bits of nonce), and it binds
the head, so that no entry can stand for another one. With a fleet key an unsealed entry is refused.
"""

import hashlib
import os
import struct

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from diptych_contracts.errors import Unverified
from diptych_kvtiers.port import Entry, TierKey

KEY_BYTES = 32
_MAGIC, _VERSION, _SEALED = b"DKVE", 1, 1
_HEAD = struct.Struct("<4sBBHQ16s32s")
_CHECKSUM_BYTES, _NONCE_BYTES, _TAG_BYTES = 16, 12, 16
HEAD_BYTES = _HEAD.size + _CHECKSUM_BYTES
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES

FRAME, OTHER, LENGTH, CHECKSUM, SEAL = "frame", "other_entry", "length", "checksum", "seal"
"""`Unverified.reason`: no entry of ours; another one's; cut or grown; altered; not of this fleet's
key, or altered on purpose."""


class Framer:
    """Makes entries of blocks, and blocks of entries."""

    def __init__(self, fleet_key: bytes | None = None) -> None:
        if fleet_key is not None and len(fleet_key) != KEY_BYTES:
            raise ValueError(f"fleet key: expected {KEY_BYTES} bytes, got {len(fleet_key)}")
        self._fleet_key = fleet_key

    @property
    def overhead_bytes(self) -> int:
        """By how much an entry is longer than its block."""
        return HEAD_BYTES + (SEAL_BYTES if self._fleet_key is not None else 0)

    def framed(self, key: TierKey, block: Entry) -> bytes:
        """The entry of `block`."""
        flags = _SEALED if self._fleet_key is not None else 0
        n_bytes = len(block) + (SEAL_BYTES if flags else 0)
        names = bytes.fromhex(key.tenant_tag), bytes.fromhex(key.block)
        head = _HEAD.pack(_MAGIC, _VERSION, flags, HEAD_BYTES, n_bytes, *names)
        if self._fleet_key is None:
            return b"".join((head, _checksum(head, block), block))
        nonce = os.urandom(_NONCE_BYTES)
        sealed = _cipher(self._fleet_key, names[0]).encrypt(nonce, block, head)
        return b"".join((head, _checksum(head, nonce, sealed), nonce, sealed))

    def opened(self, key: TierKey, entry: Entry) -> Entry:
        """The block in `entry`: a view of it, or what was sealed.

        Raises:
            Unverified: it is not the entry of `key`, or not as it was made.
        """
        view = memoryview(entry).cast("B")
        head = _checked_head(key, view)
        body = view[HEAD_BYTES:]
        if _checksum(head, body) != view[_HEAD.size : HEAD_BYTES]:
            raise Unverified(f"{_named(key)}: its checksum is another one", reason=CHECKSUM)
        sealed = bool(head[5] & _SEALED)
        if sealed != (self._fleet_key is not None):
            said = "sealed" if sealed else "not sealed"
            raise Unverified(f"{_named(key)}: it is {said}, unlike this fleet's", reason=SEAL)
        return self._unsealed(key, head, body) if self._fleet_key is not None else body

    def _unsealed(self, key: TierKey, head: memoryview, body: memoryview) -> bytes:
        assert self._fleet_key is not None
        if len(body) < SEAL_BYTES:
            raise Unverified(f"{_named(key)}: too short to be sealed", reason=LENGTH)
        cipher = _cipher(self._fleet_key, bytes(head[16:32]))
        try:
            return cipher.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], head)
        except InvalidTag as err:
            said = "sealed with another key, or altered"
            raise Unverified(f"{_named(key)}: {said}", reason=SEAL) from err


def _checked_head(key: TierKey, view: memoryview) -> memoryview:
    if len(view) < HEAD_BYTES:
        said = f"expected at least {HEAD_BYTES} bytes, got {len(view)}"
        raise Unverified(f"{_named(key)}: {said}", reason=LENGTH)
    head = view[: _HEAD.size]
    magic, version, flags, head_bytes, n_bytes, tenant, block = _HEAD.unpack(head)
    if (magic, version, head_bytes) != (_MAGIC, _VERSION, HEAD_BYTES) or flags & ~_SEALED:
        said = f"no entry of version {_VERSION}: it begins with {bytes(view[:8])!r}"
        raise Unverified(f"{_named(key)}: {said}", reason=FRAME)
    if (tenant.hex(), block.hex()) != (key.tenant_tag, key.block):
        raise Unverified(f"{_named(key)}: it is the entry of {block.hex():.16}", reason=OTHER)
    if n_bytes != len(view) - HEAD_BYTES:
        said = f"expected {n_bytes} bytes after its head, got {len(view) - HEAD_BYTES}"
        raise Unverified(f"{_named(key)}: {said}", reason=LENGTH)
    return head


def _checksum(*parts: Entry) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _cipher(fleet_key: bytes, tenant: bytes) -> AESGCM:
    own = hashlib.blake2b(tenant, key=fleet_key, digest_size=KEY_BYTES, person=b"diptych kv tier")
    return AESGCM(own.digest())


def _named(key: TierKey) -> str:
    return f"entry {key.block:.16}"
