"""Giving workers to queued requests, and keeping count of what was given."""

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import Assignment
from diptych_policy.fleet import Fleet
from diptych_policy.live_request import Booking, LiveRequest
from diptych_policy.paths import parking_of
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
        tokens, kind = demand.prompt_tokens + demand.answer_tokens, parking_of(assignment.path)
        parks = bool(kind) and (live.parked or not live.decode_started)
        live.booked[assignment.decode] = (
            Booking(
                tokens,
                0,
                parking=kind,
                parking_bytes=self._fleet.kv_bytes(assignment.decode, demand.prompt_tokens),
            )
            if parks
            else Booking(tokens, 0)
        )
        self.keep(live, assignment)
        for worker, booking in live.booked.items():
            self._fleet.assign(worker, booking.tokens, prefill_tokens=booking.prefill_tokens)
            self._fleet.park(worker, booking.parking, booking.parking_bytes)

    def keep(self, live: LiveRequest, assignment: Assignment) -> None:
        """Keep its workers for it alone, or no longer, as `assignment` says."""
        self._fleet.keep_for(live.record.request_id, live.booked if assignment.apart else ())

    def seated(self, live: LiveRequest, worker: Incarnation) -> bool:
        """`live` parks at `worker` no longer: it has a seat; whether it did park."""
        booking = live.booked.get(worker)
        if booking is None or not booking.parking:
            return False
        self._fleet.park(worker, booking.parking, -booking.parking_bytes)
        live.booked[worker] = booking._replace(parking="", parking_bytes=0)
        return True

    def release(self, live: LiveRequest, *, keep: Incarnation | None = None) -> bool:
        """Take `live` off all workers but `keep`; whether any was freed."""
        freed = [worker for worker in live.booked if worker != keep]
        for worker in freed:
            booking = live.booked.pop(worker)
            self._fleet.unassign(worker, booking.tokens, prefill_tokens=booking.prefill_tokens)
            self._fleet.park(worker, booking.parking, -booking.parking_bytes)
        assignment = live.record.assignment
        apart = assignment is not None and assignment.apart
        self._fleet.keep_for(live.record.request_id, live.booked if apart else ())
        return bool(freed)
