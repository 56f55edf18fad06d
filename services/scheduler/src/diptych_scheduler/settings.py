"""Settings of the scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from diptych_chassis.settings import ServiceSettings
from diptych_contracts.requests import KvPath, PriorityClass
from diptych_contracts.streams import RESUME_WINDOW_S
from diptych_policy.attendance import RESUME_GRACE_S
from diptych_policy.orphans import LOOK_S
from diptych_policy.paths import PathRules


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
    deployment_type: Literal["auto", "colocated", "dis-gpu", "dis-cpu", "dis-disk"] = "auto"
    """How KV gets from prefill to decode: in one worker, straight, by way of the decode worker's
    host memory or of its disk. `auto` chooses by request (`policy/paths.py`). A tier that is full
    or out of order is passed over; a request that names its own path goes by that."""
    ttft_slo_s: tuple[float, ...] = (0.0,)
    """`auto`: within which an answer should begin and go on, for every class or for three
    (interactive, standard, batch); 0: not said, then what cannot have a seat parks in the quickest
    tier that has room."""

    @property
    def path_rules(self) -> PathRules:
        """What these settings say of paths. Raises `ValueError`, naming the setting."""
        classes, slos = tuple(PriorityClass), self.ttft_slo_s
        if len(slos) not in (1, len(classes)) or not all(0 <= slo < inf for slo in slos):
            raise ValueError(
                f"TTFT_SLO_S: expected one value or three ({', '.join(classes)}) of at least 0 s, "
                f"got {slos}"
            )
        spread = slos * len(classes) if len(slos) == 1 else slos
        by_class: Mapping[PriorityClass, float] = dict(zip(classes, spread, strict=True))
        forced = None if self.deployment_type == "auto" else KvPath(self.deployment_type)
        return PathRules(forced, by_class)

    def __post_init__(self) -> None:
        _ = self.path_rules
