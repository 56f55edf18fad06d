"""Numbers of the request ledger's rules."""

from dataclasses import dataclass, field

from diptych_contracts.streams import SCHEDULERS
from diptych_policy.attendance import RESUME_GRACE_S
from diptych_policy.paths import PathRules


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of the ledger's rules."""

    max_queued: int = 1024
    max_lost_attempts: int = 5
    """Lost in a row to the death or silence of workers: see `suspicion`."""
    suspect_strikes: int = 3
    """Of these, how many make a suspect, which runs apart."""
    max_lost_with_credit: int = 7
    """Lost in all; then a few tokens prove nothing any more."""
    max_lost_in_all: int = 10
    proof_tokens: int = 8
    """An attempt that brought so many is past what killed the one before it."""
    idle_wait_s: float = 3.0
    """How long a suspect waits for idle workers before it runs beside such as get on."""
    apart_wait_s: float = 20.0
    """How long it waits for those before it runs beside anybody."""
    max_deliveries: int = SCHEDULERS.max_deliver
    """A request that comes so often has stopped whoever took it: it is not tried again."""
    max_failures: int = 5
    """Attempts given up by live workers for other reasons than room."""
    max_adoptions: int = 3
    """Adoptions without progress."""
    first_back_off_s: float = 0.1
    max_back_off_s: float = 1.0
    end_again_s: float = 2.0
    """An `End` or `Fence` that does not come back from the journal is published again after this.
    A record that is gone is written again: by then the journal has said if its request is over."""
    resume_grace_s: float = RESUME_GRACE_S
    """How long a request with resume intent outlives its gateway unread."""
    paths: PathRules = field(default_factory=PathRules)
    """What an operator says of how KV gets from prefill to decode."""
