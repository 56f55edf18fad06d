"""Texts to be made vectors of, and the answers: request and reply with one worker.

Nothing is stored: a job is a pure function of its texts, so a gateway that hears nothing of a
worker asks another.
"""

from enum import StrEnum

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.wire import Message


class EmbedJob(Message, frozen=True, kw_only=True, tag="embed_job.1"):
    """Make a vector of each text."""

    request_id: RequestId
    part: int
    """Of a request's jobs."""
    attempt: int
    """With `request_id` and `part` it names the job."""
    model: str
    texts: tuple[tuple[int, ...], ...]
    """Token ids, as the model is to see them; none is empty."""
    budget_ms: int
    """Time left."""

    @property
    def tokens(self) -> int:
        """Of all texts together."""
        return sum(map(len, self.texts))


class Embedded(Message, frozen=True, kw_only=True, tag="embedded.1"):
    """The vectors, in the texts' order."""

    request_id: RequestId
    worker: Incarnation
    size: int
    """Numbers in a vector."""
    vectors: bytes
    """Little-endian float32, `[texts, size]`, each of length 1."""


class EmbedRefusal(StrEnum):
    """Why a worker says no."""

    NO_ROOM = "no_room"
    DRAINING = "draining"
    WRONG_MODEL = "wrong_model"
    UNSUPPORTED = "unsupported"
    """The engine cannot, or a text is longer than it takes."""
    EXPIRED = "expired"


class EmbedRefused(Message, frozen=True, kw_only=True, tag="embed_refused.1"):
    """The worker does not do it."""

    request_id: RequestId
    reason: EmbedRefusal
    detail: str = ""
    retry_after_s: float = 0.0
    """NO_ROOM: how long what waits here takes."""


EmbedAnswer = Embedded | EmbedRefused


class EmbedCancel(Message, frozen=True, kw_only=True, tag="embed_cancel.1"):
    """Nobody waits for a job any more. Sent once: a job that misses it ends by its budget."""

    request_id: RequestId
    part: int
    attempt: int
