"""How a drain is told: to probes and beats while it goes on, to everybody when it is over.

A scaler may read any of three: `/health/ready` and the beats say `draining: 3 left`, then
`drained`; stream `EVENTS` holds `member_drained`; and the process ends, with code 0.
"""

import contextlib

from diptych_chassis.member import Member
from diptych_contracts import subjects
from diptych_contracts.errors import Transient
from diptych_contracts.events import MemberDrained
from diptych_telemetry import logger

_TELL_S = 1.0

log = logger(__name__)


class Drain:
    """One member's drain, from the moment it was asked to stop."""

    def __init__(self, member: Member, usual_s: float) -> None:
        self._member = member
        self._began_s = member.now_s()
        self._limit_s = member.stopping.drain_s(usual_s)
        self.tell(0)

    @property
    def left_s(self) -> float:
        """How much longer it may take; 0 when it is to be cut off."""
        return max(0.0, self._limit_s - (self._member.now_s() - self._began_s))

    def tell(self, left: int) -> None:
        """So much is still held."""
        self._member.ready(False, f"draining: {left} left" if left else "draining")

    async def done(self, *, left: int = 0) -> None:
        """Nothing is held any more; `left` of it was handed back unfinished."""
        took_ms = round((self._member.now_s() - self._began_s) * 1000)
        self._member.ready(False, "drained")
        (log.warning if left else log.info)("drained", took_ms=took_ms, left=left)
        event = MemberDrained(
            member=self._member.incarnation,
            service=self._member.service,
            took_ms=took_ms,
            left=left,
        )
        with contextlib.suppress(Transient):
            await self._member.bus.store(
                subjects.event("member_drained"),
                event,
                msg_id=f"{self._member.incarnation}.drained",
                timeout_s=_TELL_S,
            )
