"""Answers that outlive their client's connection: those with resume intent, and background ones.

Here the gateway that took a request remembers whether anybody reads the answer, at this gateway or
(they say so) at another. Unread for its grace, the request is cancelled; ended, it is archived.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import time

from diptych_contracts.ids import RequestId
from diptych_contracts.requests import Request
from diptych_contracts.responses import StoredAnswer
from diptych_gateway.answering.forging import forged
from diptych_gateway.keeping.archive import Archive
from diptych_gateway.keeping.records import Records
from diptych_gateway.keeping.stored_answers import stored_answer
from diptych_gateway.tenancy.allowances import Taking
from diptych_policy.attendance import Attendance, grace_s
from diptych_policy.journal import FORGED, JournalPart, RequestView
from diptych_telemetry import logger
from diptych_text.codec import TextCodec
from diptych_text.marked_answer import answer_text

GIVEN_UP = "the client left and did not come back"
_LAST_WORDS_S = 60.0
"""How long after its total deadline a request may take to end before it is forgotten here."""

log = logger(__name__)


@dataclass(slots=True)
class _Kept:
    request: Request
    codec: TextCodec
    attendance: Attendance
    view: RequestView = field(init=False)
    readers: int = 0
    age_s: float = 0.0
    cancelled: bool = False
    taking: Taking | None = None
    """What it took of its caller's limits, once its first reader has left."""

    def __post_init__(self) -> None:
        told = self.request.sampling.top_logprobs is not None
        self.view = RequestView(
            self.request.request_id,
            secret=self.request.secret,
            logprobs=[] if told else None,
        )

    def answer(self, ended_unix_s: int) -> StoredAnswer:
        request = self.request
        text = answer_text(self.codec, request.stopping.stop, request.answer_format)
        return stored_answer(self.view, text, self.codec, ended_unix_s=ended_unix_s)


def nobody(_: RequestView) -> None:
    """Nobody else wants to know."""


class Keeper:
    """The answers kept.

    Args:
        records: Where it is written that a request is given up.
        archive: Where answers go.
        resume_grace_s: How long one with resume intent goes on unread.
        ended: Hears of those that end unread.
    """

    def __init__(
        self,
        records: Records,
        archive: Archive,
        *,
        resume_grace_s: float,
        ended: Callable[[RequestView], None] = nobody,
    ) -> None:
        self._ended = ended
        self._records = records
        self._archive = archive
        self._resume_grace_s = resume_grace_s
        self._kept: dict[RequestId, _Kept] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request: Request, codec: TextCodec) -> None:
        """Keep the answer to `request` if it is one that outlives its client."""
        grace = grace_s(request, self._resume_grace_s)
        if grace > 0:
            self._kept[request.request_id] = _Kept(request, codec, Attendance(grace))

    def settle_later(self, request_id: RequestId, taking: Taking) -> None:
        """What it took of its caller's limits is settled when it ends."""
        self._kept[request_id].taking = taking

    def drop(self, request_id: RequestId) -> None:
        """Forget an answer."""
        kept = self._kept.pop(request_id, None)
        if kept is not None and kept.taking is not None:
            kept.taking.settle(kept.request.prompt_tokens + len(kept.view.token_ids))

    @contextmanager
    def reading(self, request_id: RequestId) -> Iterator[None]:
        """Somebody reads the answer here, inside the `with`."""
        kept = self._kept.get(request_id)
        if kept is None:
            yield
            return
        kept.readers += 1
        kept.attendance.read()
        try:
            yield
        finally:
            kept.readers -= 1
            if not kept.readers:
                kept.attendance.unread(now_s=kept.age_s)
                self._settle(kept)

    def read_elsewhere(self, request_ids: Iterable[RequestId]) -> None:
        """Another gateway has readers of these answers."""
        for request_id in request_ids:
            if (kept := self._kept.get(request_id)) is not None:
                kept.attendance.read_elsewhere(now_s=kept.age_s)

    def feed(self, part: JournalPart) -> None:
        """Take in what the journal says."""
        kept = self._kept.get(part.request_id)
        if kept is None:
            return
        change = kept.view.apply(part)
        if change is FORGED and not kept.readers:  # else they have told it
            forged(kept.view, part)
        if change.end is not None:
            self._settle(kept)

    def tick(self, elapsed_s: float, *, connected: bool) -> None:
        """Time has passed; it counts while the bus is there."""
        if not connected:
            return
        for request_id, kept in list(self._kept.items()):
            kept.age_s += elapsed_s
            if kept.attendance.given_up(now_s=kept.age_s) and not kept.cancelled:
                kept.cancelled = True
                self._records.cancel(kept.request, GIVEN_UP)
            if kept.age_s > kept.request.deadlines.total_s + _LAST_WORDS_S:
                log.warning("answer_forgotten", request_id=request_id)
                self.drop(request_id)

    def _settle(self, kept: _Kept) -> None:
        """Archive what has ended; a reader here does that itself, before its last event."""
        request_id = kept.request.request_id
        if kept.view.end is not None and not kept.readers and request_id in self:
            self.drop(request_id)
            self._ended(kept.view)
            self._archive.finish_soon(request_id, partial(kept.answer, int(time())))
