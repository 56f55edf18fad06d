"""Which deadline of a request has passed, and what that means.

All are on by default. `now_s` is the judge's clock: while the bus is away only the total deadline,
which is the bus's wall time, goes on.
"""

from dataclasses import dataclass

from diptych_policy.live_request import LiveRequest, Stage


@dataclass(frozen=True, slots=True)
class Expire:
    """The request ends."""

    detail: str


@dataclass(frozen=True, slots=True)
class GiveUpAttempt:
    """Its workers are silent: try others."""

    why: str


@dataclass(frozen=True, slots=True)
class Unread:
    """Its gateway is gone and nobody came back for the answer."""


@dataclass(frozen=True, slots=True)
class EndUnheard:
    """The end has not come back from the journal: publish it again."""


@dataclass(frozen=True, slots=True)
class FenceUnheard:
    """The fence has not come back from the journal: publish it again."""


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """Its record was deleted, and the journal tells of no end: write it again."""


Overdue = Expire | GiveUpAttempt | Unread | EndUnheard | FenceUnheard | Unrecorded


def overdue(live: LiveRequest, *, now_s: float, unix_ms: int, end_again_s: float) -> Overdue | None:
    """The deadline that has passed, if any."""
    match live.stage:
        case Stage.CREATING:
            return None
        case Stage.ENDING:
            return EndUnheard() if now_s - live.since_s >= end_again_s else None
    if unix_ms >= live.record.deadline_unix_ms:
        return Expire("the total deadline passed")
    if live.attendance.given_up(now_s=now_s):
        return Unread()
    if live.unrecorded_s is not None and now_s - live.unrecorded_s >= end_again_s:
        return Unrecorded()
    if live.stage is Stage.FENCING and now_s - live.since_s >= end_again_s:
        return FenceUnheard()
    return _token_overdue(live, now_s)


def _token_overdue(live: LiveRequest, now_s: float) -> Overdue | None:
    deadlines = live.request.deadlines
    first_token_s, inter_token_s = deadlines.first_token_s, deadlines.inter_token_s
    if not live.view.token_ids:
        if now_s - live.arrived_s < first_token_s:
            return None
        why = live.unplaced or "no token came"
        return Expire(f"no first token within {first_token_s:g} s: {why}")
    if live.stage is not Stage.ROUTED or live.parked:  # parked: its worker waits for a seat
        return None
    if live.view.attempt_has_tokens and now_s - live.progress_s >= inter_token_s:
        return GiveUpAttempt(f"no token for {inter_token_s:g} s")
    if not live.view.attempt_has_tokens and now_s - live.since_s >= first_token_s:
        return GiveUpAttempt(f"no token within {first_token_s:g} s of the new attempt")
    return None
