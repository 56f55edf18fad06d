"""Composition root of the scheduler."""

from diptych_chassis.running import Member
from diptych_policy.fleet import Fleet
from diptych_policy.limits import Limits
from diptych_policy.liveness import Liveness
from diptych_policy.recovery import Ledger
from diptych_scheduler.service import Scheduler
from diptych_scheduler.settings import SchedulerSettings


async def serve(member: Member, settings: SchedulerSettings) -> None:
    """Run a scheduler until `member` is told to stop."""
    fleet = Fleet()
    limits = Limits(max_queued=settings.max_queued, resume_grace_s=settings.resume_grace_s)
    scheduler = Scheduler(
        member,
        fleet=fleet,
        ledger=Ledger(member.incarnation, fleet, limits),
        liveness=Liveness(member.incarnation, silence_s=settings.silence_s),
        settings=settings,
    )
    await scheduler.run()
