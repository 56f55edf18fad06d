"""What a scheduler counts: read off the events it hears and the orders it gives."""

from collections.abc import Iterable

from diptych_contracts.fleet import Role
from diptych_contracts.jobs import GenerateJob, JobAccepted, JobRefused
from diptych_contracts.requests import KvPath, Mode
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import (
    AdoptRecord,
    Effect,
    Event,
    JobAnswered,
    PublishFence,
    SendJob,
)
from diptych_policy.paths import path_of
from diptych_policy.recovery import Ledger
from diptych_telemetry import metrics


class Metering:
    """The scheduler's families, kept up to date."""

    def __init__(self) -> None:
        self._families = metrics.scheduler()
        for mode in Mode:
            self._families.routed.labels(mode)
        for path in KvPath:
            self._families.paths.labels(path)
        self._forged = 0

    def heard(self, event: Event, ledger: Ledger, *, now_s: float) -> None:
        """The ledger is being told `event`, at `now_s` of the judge's clock."""
        match event:
            case JobAnswered(answer=JobRefused(reason=reason)):
                self._families.refused.labels(reason).inc()
            case JobAnswered(request_id, attempt=1, answer=JobAccepted(duplicate=False)):
                arrived_s = ledger.arrived_s(request_id)
                if arrived_s is not None:  # else it has ended meanwhile
                    self._families.route_duration.observe(now_s - arrived_s)

    def ordered(self, effects: Iterable[Effect]) -> None:
        """The ledger gave these orders."""
        for effect in effects:
            match effect:
                case SendJob(job=job):
                    mode = Mode.LOCAL if isinstance(job, GenerateJob) else Mode.REMOTE
                    self._families.routed.labels(mode).inc()
                    self._families.paths.labels(path_of(job)).inc()
                case PublishFence():
                    self._families.fences.inc()
                case AdoptRecord():
                    self._families.adoptions.inc()

    def lost(self) -> None:
        """A member was declared dead."""
        self._families.members_lost.inc()

    def found(self, *, returned: bool) -> None:
        """A member beats: if it was declared dead, it was only silent."""
        if returned:
            self._families.members_returned.inc()

    def now(self, ledger: Ledger, fleet: Fleet) -> None:
        """What is live, and who is there."""
        self._families.owned.set(len(ledger))
        self._families.queued.set(ledger.queued)
        self._families.forged.inc(ledger.forged - self._forged)
        self._forged = ledger.forged
        for role in Role:
            self._families.workers.labels(role).set(fleet.count(role))
