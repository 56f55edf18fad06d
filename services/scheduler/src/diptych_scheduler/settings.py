"""Settings of the scheduler."""

from dataclasses import dataclass

from diptych_chassis.settings import ServiceSettings
from diptych_contracts.streams import RESUME_WINDOW_S
from diptych_policy.attendance import RESUME_GRACE_S
from diptych_policy.orphans import LOOK_S


@dataclass(frozen=True, slots=True)
class SchedulerSettings(ServiceSettings):
    """`DIPTYCH_SCHEDULER__<NAME>`."""

    max_queued: int = 1024
    """Requests that may wait for workers before this replica stops pulling."""
    silence_s: float = 1.0
    """Silence after which a member counts as dead."""
    tick_s: float = 0.1
    """How often it looks who is silent and what is due."""
    job_answer_s: float = 2.0
    """How long a live worker may take to answer a job."""
    sweep_s: float = LOOK_S
    """How often is looked for long prompts that nobody needs; longer than one takes to store."""
    resume_grace_s: float = RESUME_GRACE_S
    """How long a request with resume intent outlives its gateway while nobody reads it."""
    resume_window_s: float = RESUME_WINDOW_S
    """How long after its end an answer can be taken up again: so long its record stays. Tokens stay
    75 min from when they were made, so more than an hour is of use to short answers only."""
