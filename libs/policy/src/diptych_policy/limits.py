"""Numbers of the request ledger's rules."""

from dataclasses import dataclass

from diptych_policy.attendance import RESUME_GRACE_S


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of the ledger's rules."""

    max_queued: int = 1024
    max_lost_attempts: int = 5
    max_failures: int = 5
    """Attempts given up by live workers for other reasons than room."""
    max_adoptions: int = 3
    """Adoptions without progress."""
    first_back_off_s: float = 0.1
    max_back_off_s: float = 1.0
    end_again_s: float = 2.0
    """An `End` that does not come back from the journal is published again after this."""
    resume_grace_s: float = RESUME_GRACE_S
    """How long a request with resume intent outlives its gateway unread."""
