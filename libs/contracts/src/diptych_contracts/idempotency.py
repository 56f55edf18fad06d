"""A client's `Idempotency-Key`, as bucket `idempotency` keeps it: which request it stands for.

The key is never stored: its entry is named by the hash of tenant, endpoint and key. What an answer
came to is kept as its tokens, not as text: all a client is sent is a function of its request, which
it sends again, and of them.
"""

from enum import StrEnum
from hashlib import sha256

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, TokenEntry
from diptych_contracts.responses import PartRef
from diptych_contracts.wire import Message


class ClaimState(StrEnum):
    """How far the request of a key is."""

    CLAIMED = "claimed"
    """About to be stored; whether it was, only its record can tell."""
    STORED = "stored"
    """JetStream has it."""
    ENDED = "ended"
    """Its answer is kept here."""
    FREE = "free"
    """It was refused, or came to nothing: whoever comes next runs anew."""


class KeptAnswer(Message, frozen=True, kw_only=True, tag="kept_answer.1"):
    """What a request came to, as the journal said it."""

    entry: TokenEntry
    """All its tokens."""
    end: End
    ended_unix_s: int


class Claim(Message, frozen=True, kw_only=True, tag="claim.1"):
    """What an idempotency key stands for."""

    digest: str
    """SHA-256 of the body, in hex."""
    request_id: RequestId
    gateway: Incarnation
    """Whose journal carries its tokens, unless its record names another."""
    journal_seq: int
    """No token of it is at or before this sequence."""
    created_unix_ms: int
    """The request's own time once it is stored."""
    deadline_unix_ms: int
    """End of its total deadline."""
    give_up_unix_ms: int
    """By then its gateway has stored it, or never will."""
    state: ClaimState = ClaimState.CLAIMED
    answer: KeptAnswer | None = None
    part: PartRef | None = None
    """Where a large answer is, if not here."""
    tenant: str = ""
    """Whose it is, so that a purge finds it; its name does not tell."""
    secret: bytes = b""
    """The request's."""


def claim_key(tenant: str, endpoint: str, key: str) -> str:
    """The name of a key's entry."""
    return sha256("\0".join((tenant, endpoint, key)).encode()).hexdigest()
