"""Composition root of the scheduler."""

from collections.abc import Callable

from diptych_chassis.running import Member
from diptych_contracts.ids import Incarnation
from diptych_policy.fleet import Fleet
from diptych_policy.limits import Limits
from diptych_policy.liveness import Liveness
from diptych_policy.recovery import Ledger
from diptych_scheduler.service import Scheduler
from diptych_scheduler.settings import SchedulerSettings

MakeLedger = Callable[[Incarnation, Fleet, Limits], Ledger]


async def serve(
    member: Member, settings: SchedulerSettings, *, make_ledger: MakeLedger = Ledger
) -> None:
    """Run a scheduler until `member` is told to stop."""
    fleet = Fleet()
    limits = Limits(
        max_queued=settings.max_queued,
        resume_grace_s=settings.resume_grace_s,
        paths=settings.path_rules,
    )
    scheduler = Scheduler(
        member,
        fleet=fleet,
        ledger=make_ledger(member.incarnation, fleet, limits),
        liveness=Liveness(member.incarnation, silence_s=settings.silence_s),
        settings=settings,
    )
    await scheduler.run()
