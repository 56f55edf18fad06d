"""Composition root of the power governor."""

from diptych_chassis.running import Member
from diptych_contracts.power import GovernorLease
from diptych_contracts.streams import LEASE_TTL_S, LEASES
from diptych_policy.power import PowerGovernor
from diptych_power_governor.leading import Leadership
from diptych_power_governor.service import GovernorService
from diptych_power_governor.settings import GovernorSettings


async def serve(member: Member, settings: GovernorSettings) -> None:
    """Govern until `member` is told to stop."""
    leadership = Leadership(
        member.bus.bucket(LEASES, GovernorLease),
        member.incarnation,
        ttl_s=LEASE_TTL_S,
        now_s=member.now_s,
    )
    governor = PowerGovernor(budget_w=settings.budget_w, lease_s=settings.lease_s)
    await GovernorService(member, governor, leadership, settings).run()
