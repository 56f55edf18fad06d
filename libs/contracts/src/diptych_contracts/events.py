"""Life-cycle events: stream `EVENTS`, for audit and replay. Nothing waits for them."""

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End
from diptych_contracts.requests import Assignment
from diptych_contracts.wire import Message


class RequestQueued(Message, frozen=True, kw_only=True, tag="request_queued.1"):
    """A scheduler took a request on."""

    request_id: RequestId
    scheduler: Incarnation


class RequestRouted(Message, frozen=True, kw_only=True, tag="request_routed.1"):
    """An attempt was given to workers."""

    request_id: RequestId
    attempt: int
    assignment: Assignment


class RequestEnded(Message, frozen=True, kw_only=True, tag="request_ended.1"):
    """A request has ended; published once, with id `<request>.end`.

    Whoever tells it says the same: all of it stands in record and journal.
    """

    request_id: RequestId
    end: End
    tenant: str = ""
    """Whose it was; empty: nobody could read that."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    """How many the journal holds, however it ended."""


class MemberJoined(Message, frozen=True, kw_only=True, tag="member_joined.1"):
    """A worker was seen for the first time."""

    member: Incarnation


class MemberLost(Message, frozen=True, kw_only=True, tag="member_lost.1"):
    """A worker has been silent for too long."""

    member: Incarnation
    silent_ms: int


class MemberDrained(Message, frozen=True, kw_only=True, tag="member_drained.1"):
    """A process that was asked to stop takes nothing more and holds nothing more: it leaves."""

    member: Incarnation
    service: str
    took_ms: int
    """Since it was asked."""
    left: int = 0
    """What it handed back unfinished because its time to drain was over."""


class RequestDied(Message, frozen=True, kw_only=True, tag="request_died.1"):
    """A request ended `failed` and stands in stream `DEAD`; published once, as `<request>.dead`."""

    request_id: RequestId
    cause: str
    """One of `contracts.dead.Cause`."""
    detail: str
    lost_attempts: int = 0
    workers: tuple[Incarnation, ...] = ()
    """Those that were lost while they had it."""


LifeCycleEvent = (
    RequestQueued
    | RequestRouted
    | RequestEnded
    | RequestDied
    | MemberJoined
    | MemberLost
    | MemberDrained
)
