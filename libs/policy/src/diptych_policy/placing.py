"""Giving workers to queued requests, and keeping count of what was given."""

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import Assignment
from diptych_policy.fleet import Fleet
from diptych_policy.live_request import Booking, LiveRequest
from diptych_policy.routing import Demand, Unplaced, choose, soonest_idle


class Placer:
    """Books requests in a fleet: telemetry lags, bookings do not."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def place(self, live: LiveRequest, demand: Demand) -> Assignment | None:
        """The workers for the next attempt, booked; None (and why, in `live`) if there are none."""
        placement = choose(demand, self._fleet)
        if isinstance(placement, Unplaced):
            live.unplaced = placement.reason
            return None
        self.book(live, placement)
        return placement

    def keep_back(self, demand: Demand | None, request_id: RequestId) -> None:
        """Have workers fall idle for what `demand` asks for; None: no longer."""
        workers = soonest_idle(demand, self._fleet) if demand is not None else ()
        self._fleet.keep_for(request_id, workers)

    def book(self, live: LiveRequest, assignment: Assignment) -> None:
        """Count `live` as given to its workers."""
        demand = live.demand()
        if assignment.prefill is not None and not live.decode_started:
            to_compute = self._fleet.prefill_tokens(
                assignment.prefill, demand.prompt, demand.prompt_tokens
            )
            live.booked[assignment.prefill] = Booking(demand.prompt_tokens, to_compute)
        live.booked[assignment.decode] = Booking(demand.prompt_tokens + demand.answer_tokens, 0)
        self.keep(live, assignment)
        for worker, (tokens, prefill_tokens) in live.booked.items():
            self._fleet.assign(worker, tokens, prefill_tokens=prefill_tokens)

    def keep(self, live: LiveRequest, assignment: Assignment) -> None:
        """Keep its workers for it alone, or no longer, as `assignment` says."""
        self._fleet.keep_for(live.record.request_id, live.booked if assignment.apart else ())

    def release(self, live: LiveRequest, *, keep: Incarnation | None = None) -> bool:
        """Take `live` off all workers but `keep`; whether any was freed."""
        freed = [worker for worker in live.booked if worker != keep]
        for worker in freed:
            tokens, prefill_tokens = live.booked.pop(worker)
            self._fleet.unassign(worker, tokens, prefill_tokens=prefill_tokens)
        assignment = live.record.assignment
        apart = assignment is not None and assignment.apart
        self._fleet.keep_for(live.record.request_id, live.booked if apart else ())
        return bool(freed)
