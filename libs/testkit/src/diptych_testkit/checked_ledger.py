"""A ledger that is checked after every event."""

from diptych_contracts.ids import RequestId
from diptych_policy.lifecycle import Effect, Event
from diptych_policy.live_request import Stage
from diptych_policy.recovery import Ledger


class CheckedLedger(Ledger):
    """Raises at once where an invariant is broken."""

    def handle(self, event: Event, *, now_s: float, unix_ms: int) -> list[Effect]:
        """What follows from `event`."""
        effects = super().handle(event, now_s=now_s, unix_ms=unix_ms)
        self.check()
        return effects

    def stages(self) -> dict[RequestId, Stage]:
        """Where each live request stands."""
        return {request_id: live.stage for request_id, live in self._live.items()}
