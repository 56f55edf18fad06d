"""Deletes stored prompts that a crash has left over; which those are, `policy.orphans` says."""

from diptych_bus.port import Bus
from diptych_contracts.errors import Permanent
from diptych_contracts.requests import RequestRecord
from diptych_contracts.streams import PROMPTS, REQUEST_RECORDS, SCHEDULERS
from diptych_policy.orphans import Found, OrphanedPrompts
from diptych_telemetry import logger

log = logger("scheduler")


class PromptSweep:
    """One replica's look; replicas may find the same ones."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records = bus.bucket(REQUEST_RECORDS, RequestRecord)
        self._orphans = OrphanedPrompts()

    async def look(self) -> None:
        """Look once. Raises `Transient` while the bus is away."""
        names = await self._bus.object_names(PROMPTS)
        # Before the records are read: who is done by now has made them.
        backlog = await self._bus.backlog(SCHEDULERS)
        found = [one for name in names if (one := await self._found(name)) is not None]
        for name in self._orphans.look(
            found, newest_seq=backlog.newest_seq, done_seq=backlog.done_seq
        ):
            log.warning("prompt_left_over", request_id=name)
            await self._bus.delete_object(PROMPTS, name)

    async def _found(self, name: str) -> Found | None:
        """A prompt and its record; None if nobody can read that: then it is left alone."""
        try:
            kept = await self._records.get(name)
        except Permanent as err:
            log.error("record_unreadable", request_id=name, error=str(err))
            return None
        return Found(name, kept.value if kept else None)
