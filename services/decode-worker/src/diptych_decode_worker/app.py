"""Composition root: a worker in the decode role."""

from diptych_chassis.member import Member
from diptych_contracts.fleet import Role
from diptych_decode_worker.settings import DecodeWorkerSettings
from diptych_worker import assembling


async def serve(member: Member, settings: DecodeWorkerSettings) -> None:
    """Run a decode worker until `member` is told to stop."""
    await assembling.serve(member, settings, Role.DECODE)
