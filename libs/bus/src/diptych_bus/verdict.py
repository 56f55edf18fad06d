"""What becomes of a pulled message, given how its handling ended. The only place that says so."""

from enum import StrEnum

from diptych_contracts.errors import DiptychError, Expired, Permanent


class Verdict(StrEnum):
    """What to do with the message."""

    ACK = "ack"
    """Handled: acknowledge, once its outcome is durable."""
    NAK = "nak"
    """Not now: have it delivered again."""
    FAIL = "fail"
    """Never: what can be told is told and kept in stream `DEAD`; acknowledge."""
    DROP = "drop"
    """Too late: acknowledge and forget."""
    DEAD = "dead"
    """Tried too often: the server says so on stream `UNDELIVERED`; whoever hears it ends it."""


def verdict(
    error: BaseException | None, *, num_delivered: int = 1, max_deliver: int | None = None
) -> Verdict:
    """The verdict on a message whose handling ended with `error` (None: well).

    A lost compare-and-swap and a worker's "no" are worth another look. Once `max_deliver` is
    reached JetStream delivers no more: to ask for it again would be in vain.

    Raises:
        BaseException: `error` itself, if it is none of ours: a bug ends the process.
    """
    match error:
        case None:
            return Verdict.ACK
        case Expired():
            return Verdict.DROP
        case Permanent():
            return Verdict.FAIL
        case DiptychError():
            last = max_deliver is not None and num_delivered >= max_deliver
            return Verdict.DEAD if last else Verdict.NAK
        case _:
            raise error
