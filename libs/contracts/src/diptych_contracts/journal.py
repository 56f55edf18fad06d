"""The journal: what stream `TOKENS` stores about each request, in the one order that counts.

A reader and a recoverer fold the same entries with `policy.journal`, so they agree on what was
delivered. Whoever writes here says with each part who speaks: a voice (`policy.voices`) that only
the request's gateway, its owner and the attempt's own workers know.
"""

from enum import StrEnum

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.wire import Message


class EndReason(StrEnum):
    """How a request ended. Exactly one per accepted request."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def is_finish(self) -> bool:
        """Whether the answer is complete (as far as its limits allow)."""
        return self in (EndReason.STOP, EndReason.LENGTH)


class Report(Message, frozen=True, kw_only=True, tag="report.1"):
    """What an attempt took. Times in ms, energy in J."""

    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    link: str = ""
    attempt: int = 1
    prefill_wait_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    """From the end of prefill to verified KV at the decode worker."""
    transfer_bytes: int = 0
    decode_ms: float = 0.0
    prefill_j: float = 0.0
    decode_j: float = 0.0
    energy_source: str = "sim"
    cached_tokens: int = 0
    """Leading tokens of prompt and delivered answer whose KV the prefill worker had cached."""
    engine: str = ""
    """Adapter and build of the engine that sampled the answer's last token."""
    path: str = ""
    """How KV got from prefill to decode (`requests.KvPath`)."""
    parked_ms: float = 0.0
    """How long it waited at the decode worker for a seat."""


Chances = tuple[tuple[int, float], ...]
"""(token, logprob): the chosen token first, then the likeliest ones, likeliest first."""


class TokenEntry(Message, frozen=True, kw_only=True, tag="token_entry.1"):
    """New tokens of one request. `index` counts from the answer's first token, across attempts."""

    request_id: RequestId
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Chances, ...] = ()
    """One per token, where the request asked for them."""
    voice: bytes = b""
    """Who says it: `policy.voices`."""


class End(Message, frozen=True, kw_only=True, tag="end.1"):
    """The end of a request. The first one of the newest attempt counts."""

    request_id: RequestId
    attempt: int
    reason: EndReason
    detail: str = ""
    tokens: int | None = None
    """How many tokens the answer has; absent if the sender does not know (cancel, expiry)."""
    report: Report | None = None
    cause: str = ""
    """Where it failed: one of `contracts.dead.Cause`."""
    voice: bytes = b""
    """Who says it: `policy.voices`."""


class TokenFrame(Message, frozen=True, kw_only=True, tag="token_frame.1"):
    """One engine step's news for one gateway: tokens of all its sequences, and ends."""

    worker: Incarnation
    entries: tuple[TokenEntry, ...] = ()
    ends: tuple[End, ...] = ()


class Fence(Message, frozen=True, kw_only=True, tag="fence.1"):
    """From here on only `attempt` counts: what older attempts still say is dropped."""

    request_id: RequestId
    attempt: int
    voice: bytes = b""
    """Who says it: `policy.voices`."""


class Started(Message, frozen=True, kw_only=True, tag="started.1"):
    """A worker has taken over an attempt: a decode worker after its KV was verified."""

    request_id: RequestId
    attempt: int
    worker: Incarnation
    phase: str
    """`prefill` or `decode`; `parked`: its KV is there and waits for a seat, `decode` follows."""
    voice: bytes = b""
    """Who says it: `policy.voices`."""


class AttemptFailed(Message, frozen=True, kw_only=True, tag="attempt_failed.1"):
    """A worker gave an attempt up; its owner decides what follows."""

    request_id: RequestId
    attempt: int
    worker: Incarnation
    """The one that could not go on: the next attempt avoids it for a moment."""
    reason: str
    detail: str = ""
    retryable: bool = True
    voice: bytes = b""
    """Who says it: `policy.voices`."""


JournalEntry = TokenFrame | Fence | Started | AttemptFailed | End
"""Everything stream `TOKENS` may hold."""
