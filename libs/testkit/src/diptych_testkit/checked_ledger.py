"""A scheduler whose ledger is checked after every event."""

from typing import Self

from diptych_chassis.member import Member
from diptych_contracts.ids import RequestId
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import Effect, Event
from diptych_policy.limits import Limits
from diptych_policy.live_request import Stage
from diptych_policy.liveness import Liveness
from diptych_policy.recovery import Ledger
from diptych_scheduler.service import Scheduler
from diptych_scheduler.settings import SchedulerSettings


class CheckedLedger(Ledger):
    """Raises at once where an invariant is broken, or a limit exceeded."""

    @classmethod
    def of(cls, member: Member, settings: SchedulerSettings) -> Self:
        """The ledger of a scheduler with these settings."""
        limits = Limits(max_queued=settings.max_queued, resume_grace_s=settings.resume_grace_s)
        return cls(member.incarnation, Fleet(), limits)

    def scheduler(self, member: Member, settings: SchedulerSettings) -> Scheduler:
        """The scheduler of this ledger, composed as the service does it."""
        return Scheduler(
            member,
            fleet=self._fleet,
            ledger=self,
            liveness=Liveness(member.incarnation, silence_s=settings.silence_s),
            settings=settings,
        )

    def handle(self, event: Event, *, now_s: float, unix_ms: int) -> list[Effect]:
        """What follows from `event`."""
        effects = super().handle(event, now_s=now_s, unix_ms=unix_ms)
        self.check()
        return effects

    def stages(self) -> dict[RequestId, Stage]:
        """Where each live request stands."""
        return {request_id: live.stage for request_id, live in self._live.items()}
