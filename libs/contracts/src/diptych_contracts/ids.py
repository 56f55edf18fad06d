"""Ids. A process id is an *incarnation*: a restarted process inherits nothing."""

import hashlib
from random import Random
from typing import NewType

RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)
Incarnation = NewType("Incarnation", str)
"""`<service>-<hex>`: one life of one process, e.g. `decode-worker-9f3a61c2`."""

_REQUEST_BITS = 128
_INCARNATION_BITS = 48


def new_request_id(rng: Random) -> RequestId:
    """A request id: 32 hex digits. Clients see it with a prefix (`chatcmpl-…`)."""
    return RequestId(f"{rng.getrandbits(_REQUEST_BITS):032x}")


def sibling(request_id: RequestId, number: int) -> RequestId:
    """The id of the `number`-th request of one call, of which `request_id` is the first, 0."""
    if number == 0:
        return request_id
    digest = hashlib.blake2b(f"{request_id}:{number}".encode(), digest_size=_REQUEST_BITS // 8)
    return RequestId(digest.hexdigest())


def new_incarnation(service: str, rng: Random) -> Incarnation:
    """An id for this life of a process of `service`."""
    return Incarnation(f"{service}-{rng.getrandbits(_INCARNATION_BITS):012x}")


def transfer_id(request_id: RequestId, attempt: int) -> TransferId:
    """The one id both sides of a KV transfer use: an attempt has at most one transfer."""
    return TransferId(f"{request_id}.{attempt}")
