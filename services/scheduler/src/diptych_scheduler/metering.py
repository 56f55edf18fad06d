"""What a scheduler counts: read off the events it hears and the orders it gives."""

from collections import OrderedDict
from collections.abc import Iterable

from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import GenerateJob, JobRefused
from diptych_contracts.requests import Mode
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import (
    AdoptRecord,
    Effect,
    Event,
    JobAnswered,
    PublishFence,
    SendJob,
)
from diptych_policy.recovery import Ledger
from diptych_telemetry import metrics

_REMEMBERED = 256


class Metering:
    """The scheduler's families, kept up to date."""

    def __init__(self) -> None:
        self._families = metrics.scheduler()
        for mode in Mode:
            self._families.routed.labels(mode)
        self._lost: OrderedDict[Incarnation, None] = OrderedDict()

    def heard(self, event: Event) -> None:
        """The ledger was told `event`."""
        if isinstance(event, JobAnswered) and isinstance(event.answer, JobRefused):
            self._families.refused.labels(event.answer.reason).inc()

    def ordered(self, effects: Iterable[Effect]) -> None:
        """The ledger gave these orders."""
        for effect in effects:
            match effect:
                case SendJob(job=job):
                    mode = Mode.LOCAL if isinstance(job, GenerateJob) else Mode.REMOTE
                    self._families.routed.labels(mode).inc()
                case PublishFence():
                    self._families.fences.inc()
                case AdoptRecord():
                    self._families.adoptions.inc()

    def lost(self, member: Incarnation) -> None:
        """`member` was declared dead."""
        self._families.members_lost.inc()
        self._lost[member] = None
        while len(self._lost) > _REMEMBERED:
            self._lost.popitem(last=False)

    def found(self, member: Incarnation) -> None:
        """`member` beats: if it was declared dead, that was wrong."""
        if member in self._lost:
            del self._lost[member]
            self._families.false_alarms.inc()

    def now(self, ledger: Ledger, fleet: Fleet) -> None:
        """What is live, and who is there."""
        self._families.owned.set(len(ledger))
        self._families.queued.set(ledger.queued)
        for role in Role:
            self._families.workers.labels(role).set(fleet.count(role))
