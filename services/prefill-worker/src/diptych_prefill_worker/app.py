"""Composition root: a worker in the prefill role."""

from diptych_chassis.member import Member
from diptych_contracts.fleet import Role
from diptych_prefill_worker.settings import PrefillWorkerSettings
from diptych_worker import assembling


async def serve(member: Member, settings: PrefillWorkerSettings) -> None:
    """Run a prefill worker until `member` is told to stop."""
    await assembling.serve(member, settings, Role.PREFILL)
