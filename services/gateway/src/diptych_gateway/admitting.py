"""Admission at the door: a place for as long as a request lasts, or an answer that says when."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diptych_gateway.errors import ApiError
from diptych_policy.admission import Admission, Declined, Obstacle
from diptych_telemetry import metrics


@contextmanager
def admitted(admission: Admission, now_s: Callable[[], float]) -> Iterator[None]:
    """Hold a place inside the `with`.

    Raises:
        ApiError: there is none, with the time to ask again.
    """
    declined = admission.enter(now_s=now_s())
    if declined is not None:
        raise refusal(declined, admission.limit)
    metrics.gateway().open_streams.set(admission.in_flight)
    try:
        yield
    finally:
        admission.leave(now_s=now_s())
        metrics.gateway().open_streams.set(admission.in_flight)


def refusal(declined: Declined, limit: int) -> ApiError:
    """What a client is told who found no place."""
    match declined.obstacle:
        case Obstacle.FULL:
            text = f"{limit} requests are in flight, which is the limit"
            return ApiError(
                429, text, code="rate_limit_exceeded", retry_after_s=declined.retry_after_s
            )
        case Obstacle.DRAINING:
            text = "this gateway is shutting down"
            return ApiError(503, text, code="draining", retry_after_s=declined.retry_after_s)
