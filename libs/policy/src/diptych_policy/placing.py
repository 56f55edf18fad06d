"""Giving workers to queued requests, and keeping count of what was given."""

from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import Assignment
from diptych_policy.fleet import Fleet
from diptych_policy.live_request import Booking, LiveRequest
from diptych_policy.routing import Unplaced, choose


class Placer:
    """Books requests in a fleet: telemetry lags, bookings do not."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def place(self, live: LiveRequest, *, now_s: float) -> Assignment | None:
        """The workers for the next attempt, booked; None (and why, in `live`) if there are none."""
        live.excluded = {w: t for w, t in live.excluded.items() if t > now_s}
        placement = choose(live.demand(), self._fleet)
        if isinstance(placement, Unplaced):
            live.unplaced = placement.reason
            return None
        self.book(live, placement)
        return placement

    def book(self, live: LiveRequest, assignment: Assignment) -> None:
        """Count `live` as given to its workers."""
        demand = live.demand()
        if assignment.prefill is not None and not live.decode_started:
            to_compute = self._fleet.prefill_tokens(
                assignment.prefill, demand.prompt, demand.prompt_tokens
            )
            live.booked[assignment.prefill] = Booking(demand.prompt_tokens, to_compute)
        live.booked[assignment.decode] = Booking(demand.prompt_tokens + demand.answer_tokens, 0)
        for worker, (tokens, prefill_tokens) in live.booked.items():
            self._fleet.assign(worker, tokens, prefill_tokens=prefill_tokens)

    def release(self, live: LiveRequest, *, keep: Incarnation | None = None) -> bool:
        """Take `live` off all workers but `keep`; whether any was freed."""
        freed = [worker for worker in live.booked if worker != keep]
        for worker in freed:
            tokens, prefill_tokens = live.booked.pop(worker)
            self._fleet.unassign(worker, tokens, prefill_tokens=prefill_tokens)
        return bool(freed)
