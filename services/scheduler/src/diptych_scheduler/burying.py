"""Stream `DEAD`: what could not be served is kept there, once."""

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context

from diptych_bus.port import Bus, Delivery
from diptych_contracts import subjects
from diptych_contracts.dead import Cause, DeadLetter, DeadRequest
from diptych_contracts.errors import BusAway, DiptychError, Permanent
from diptych_contracts.ids import RequestId
from diptych_contracts.streams import DEAD_PROMPTS, GATEWAY_HEADER, PROMPTS
from diptych_telemetry import logger, metrics

STORE_S = 1.0

log = logger("scheduler")


def trace_id(context: Context | None) -> str:
    """The trace of a request's sender as 32 hex digits; empty if it sent none."""
    if context is None:
        return ""
    found = trace.get_current_span(context).get_span_context().trace_id
    return f"{found:032x}" if found else ""


async def bury_request(bus: Bus, dead: DeadRequest, context: Context | None) -> None:
    """Keep a request that failed; said again it changes nothing. Raises `Transient`."""
    if dead.request is not None and dead.request.prompt is not None:
        await _keep_prompt(bus, dead.request_id, dead.request.prompt.name)
    dead = msgspec.structs.replace(dead, trace_id=trace_id(context))
    subject = subjects.dead_request(dead.request_id)
    try:
        done = await bus.store(subject, dead, msg_id=subject, timeout_s=STORE_S)
    except Permanent:  # with all this beside it the request is too large for one message
        dead = msgspec.structs.replace(dead, request=None)
        done = await bus.store(subject, dead, msg_id=subject, timeout_s=STORE_S)
    if not done.duplicate:
        metrics.scheduler().dead.labels(dead.cause).inc()
        log.error(
            "request_died",
            request_id=dead.request_id,
            cause=dead.cause,
            detail=dead.detail,
            lost_attempts=dead.lost_attempts,
            trace_id=dead.trace_id,
        )


async def _keep_prompt(bus: Bus, request_id: RequestId, name: str) -> None:
    """Copy a long prompt, which goes with its record, to where it is kept as long as `DEAD`."""
    data = await bus.get_object(PROMPTS, name)
    try:
        if data is not None:
            await bus.put_object(DEAD_PROMPTS, request_id, data)
    except BusAway:
        raise
    except DiptychError as err:  # no room: the rest is worth keeping all the same
        log.warning("prompt_not_kept", request_id=request_id, error=str(err))


async def bury_letter(bus: Bus, stream: str, seq: int, delivery: Delivery, reason: str) -> None:
    """Keep a stored message that cannot be read. Raises `Transient`."""
    letter = DeadLetter(
        subject=delivery.subject,
        reason=reason,
        payload=delivery.data,
        request_id=delivery.headers.get("Nats-Msg-Id", ""),
        gateway=delivery.headers.get(GATEWAY_HEADER, ""),
        died_unix_ms=bus.unix_ms(),
        trace_id=trace_id(delivery.context),
    )
    subject, msg_id = subjects.dead(stream), f"{stream}.{seq}"
    try:
        done = await bus.store(subject, letter, msg_id=msg_id, timeout_s=STORE_S)
    except Permanent:  # it filled a message by itself: its beginning must do
        half = letter.payload[: len(letter.payload) // 2]
        letter = msgspec.structs.replace(letter, payload=half)
        done = await bus.store(subject, letter, msg_id=msg_id, timeout_s=STORE_S)
    if not done.duplicate:
        metrics.scheduler().dead.labels(Cause.UNREADABLE).inc()
        log.error("dead_letter", subject=delivery.subject, seq=seq, reason=reason)
