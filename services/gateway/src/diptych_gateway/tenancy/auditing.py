"""What keys do at `/admin/v1`, and try to do, is written into stream `AUDIT`.

A console asks every few seconds, and one who may not may ask as often as he likes: of a key the
same is written down once a minute, so that nobody drives older entries out of the stream.
"""

from collections import OrderedDict
from collections.abc import Callable
from random import Random

from diptych_bus.port import Bus
from diptych_contracts import subjects
from diptych_contracts.audit import Action, Audited, Outcome
from diptych_contracts.errors import Transient
from diptych_gateway.tenancy.callers import Caller
from diptych_telemetry import logger

EVERY_S = 60.0
MAX_REMEMBERED = 4096
_STORE_S = 3.0

log = logger(__name__)


class Auditing:
    """The audit, as a gateway writes it."""

    def __init__(self, bus: Bus, now_s: Callable[[], float], rng: Random) -> None:
        self._bus = bus
        self._now_s = now_s
        self._rng = rng
        self._written: OrderedDict[tuple[str, Action, Outcome], float] = OrderedDict()

    async def note(self, caller: Caller, action: Action, outcome: Outcome) -> None:
        """Write it down, unless that was done within the last minute."""
        what, now_s = (caller.key_id, action, outcome), self._now_s()
        if now_s - self._written.get(what, -EVERY_S) < EVERY_S:
            return
        audit_id = f"{self._rng.getrandbits(64):016x}"
        entry = Audited(
            audit_id=audit_id,
            action=action,
            actor=f"key:{caller.key_id}",
            door="http",
            outcome=outcome,
            unix_ms=self._bus.unix_ms(),
        )
        try:
            await self._bus.store(
                subjects.audit(action), entry, msg_id=f"{audit_id}.{outcome}", timeout_s=_STORE_S
            )
        except Transient as err:
            log.warning("audit_not_written", action=action, outcome=outcome, error=str(err))
            if outcome is not Outcome.REFUSED:
                raise
            return
        while len(self._written) >= MAX_REMEMBERED:
            self._written.popitem(last=False)
        self._written[what] = now_s
