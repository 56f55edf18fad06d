"""Admission at the door: a place for as long as a request lasts, or an answer that says when."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from diptych_bus.port import Bus, Delivery, Subscription
from diptych_contracts import subjects
from diptych_contracts.errors import StoreFull, Transient
from diptych_contracts.fleet import QueueLoad
from diptych_contracts.requests import Deadlines, PriorityClass
from diptych_gateway import metrics as gateway_metrics
from diptych_gateway.errors import ApiError
from diptych_policy.admission import Admission, Declined, Obstacle
from diptych_telemetry import metrics


@contextmanager
def admitted(
    admission: Admission,
    now_s: Callable[[], float],
    priority_class: PriorityClass = PriorityClass.INTERACTIVE,
) -> Iterator[None]:
    """Hold a place inside the `with`.

    Raises:
        ApiError: there is none, with the time to ask again.
    """
    declined = admission.enter(priority_class, now_s=now_s())
    if declined is not None:
        raise refusal(declined, admission.limit, priority_class)
    metrics.gateway().open_streams.set(admission.in_flight)
    try:
        yield
    finally:
        admission.leave(priority_class, now_s=now_s())
        metrics.gateway().open_streams.set(admission.in_flight)


@dataclass(slots=True, kw_only=True)
class Door:
    """Hears the schedulers' queues, and turns away what they could not serve in time."""

    bus: Bus
    admission: Admission
    deadlines: Mapping[PriorityClass, Deadlines]
    now_s: Callable[[], float]
    _listening: Subscription | None = None

    async def start(self) -> None:
        """Hear schedulers."""
        self._listening = await self.bus.subscribe(subjects.QUEUES, self._on_queue)

    async def close(self) -> None:
        """Hear no more."""
        if self._listening is not None:
            await self._listening.close()

    def check(self, priority_class: PriorityClass) -> None:
        """Raise `ApiError` if a request of the class would not be served in time."""
        first_token_s = self.deadlines[priority_class].first_token_s
        declined = self.admission.in_time(
            priority_class, first_token_s=first_token_s, now_s=self.now_s()
        )
        if declined is not None:
            raise refusal(declined, self.admission.limit, priority_class)

    def stored(self, priority_class: PriorityClass) -> None:
        """One more request of the class is on its way to the schedulers."""
        self.admission.queues.entered(priority_class)

    def not_stored(self, err: Transient, priority_class: PriorityClass) -> ApiError:
        """What a client is told whose request JetStream did not take."""
        full = isinstance(err, StoreFull)
        obstacle = Obstacle.STORAGE_FULL if full else Obstacle.BUS_AWAY
        declined = self.admission.not_stored(priority_class, obstacle, now_s=self.now_s())
        return refusal(declined, self.admission.limit, priority_class)

    def kept_full(self, most: int, priority_class: PriorityClass) -> ApiError:
        """What a client is told where no more answers are kept for their clients' return."""
        retry_after_s = self.admission.next_place_s(priority_class, now_s=self.now_s())
        text = f"{most} answers are kept for their clients, the limit"
        return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=retry_after_s)

    def _on_queue(self, delivery: Delivery) -> None:
        self.admission.queues.heard(delivery.decode(QueueLoad), now_s=self.now_s())


def refusal(
    declined: Declined, limit: int, priority_class: PriorityClass = PriorityClass.INTERACTIVE
) -> ApiError:
    """What a client is told who is not taken: a status, a reason, and when to come back."""
    gateway_metrics.refused(declined.obstacle.name.lower(), priority_class)
    match declined.obstacle:
        case Obstacle.FULL:
            status, code = 429, "rate_limit_exceeded"
            text = f"{limit} requests are in flight, which is the limit"
        case Obstacle.DRAINING:
            status, code = 503, "draining"
            text = "this gateway is shutting down"
        case Obstacle.QUEUE_FULL:
            status, code = 429, "queue_full"
            text = f"the queue takes no more requests of class '{priority_class}'"
        case Obstacle.TOO_LATE:
            status, code = 503, "no_capacity"
            text = (
                f"a request of class '{priority_class}' would wait about {declined.wait_s:.0f} s "
                "for its first token, longer than it may"
            )
        case Obstacle.STORAGE_FULL:
            status, code = 429, "storage_full"
            text = "JetStream has no room for the request: it was not stored"
        case Obstacle.BUS_AWAY:
            status, code = 503, "unavailable"
            text = "the request was not accepted in time: JetStream did not answer"
    return ApiError(status, text, code=code, retry_after_s=declined.retry_after_s)
