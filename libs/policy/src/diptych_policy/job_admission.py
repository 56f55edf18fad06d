"""Which jobs a worker takes: its own admission is the authority.

Idempotent on (request, attempt): the same job again is a duplicate, whatever became of it. A newer
attempt stands for a fence, so older ones of the same request are to be stopped. A cancelled attempt
that arrives late is refused.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from diptych_contracts.ids import RequestId
from diptych_contracts.jobs import RefusalReason

MAX_WAITING = 64
"""Prefill jobs that may wait in a worker's own queue."""
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Admitted:
    """Go on. `stale` attempts of the same request are to be stopped."""

    duplicate: bool = False
    stale: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """Refuse."""

    reason: RefusalReason
    detail: str = ""


class JobAdmission:
    """Seats of one worker.

    Args:
        max_sequences: Seats that need engine room at once.
        kv_tokens: KV cells all seated sequences may grow to together.
        max_waiting: Jobs that may wait in the engine's own queue.
    """

    def __init__(
        self, *, max_sequences: int, kv_tokens: int, max_waiting: int = MAX_WAITING
    ) -> None:
        self._max_sequences = max_sequences
        self._kv_tokens = kv_tokens
        self._max_waiting = max_waiting
        self._seats: dict[tuple[RequestId, int], int] = {}
        self._past: OrderedDict[tuple[RequestId, int], None] = OrderedDict()
        self._cancelled: OrderedDict[RequestId, int] = OrderedDict()
        self.draining = False
        self.out_of_order = ""
        """Why nothing can run here for the time being, if so: its engine is gone, say."""

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[tuple[RequestId, int]]:
        return iter(list(self._seats))

    @property
    def promised_tokens(self) -> int:
        """KV cells all seats may grow to."""
        return sum(self._seats.values())

    def admit(
        self, request_id: RequestId, attempt: int, tokens: int, *, may_wait: bool
    ) -> Admitted | NotAdmitted:
        """Seat a job of up to `tokens` cells; one that may wait needs no room yet."""
        key = (request_id, attempt)
        if key in self._seats or key in self._past:
            return Admitted(duplicate=True)
        if attempt <= self._cancelled.get(request_id, 0):
            return NotAdmitted(RefusalReason.CANCELLED)
        refusal = self._no_seat(tokens, may_wait=may_wait)
        if refusal is not None:
            return refusal
        stale = tuple(a for r, a in self._seats if r == request_id and a < attempt)
        self._seats[key] = tokens
        return Admitted(stale=stale)

    def _no_seat(self, tokens: int, *, may_wait: bool) -> NotAdmitted | None:
        if self.draining:
            return NotAdmitted(RefusalReason.DRAINING)
        if self.out_of_order:
            return NotAdmitted(RefusalReason.NO_ROOM, self.out_of_order)
        if tokens > self._kv_tokens:
            detail = f"needs {tokens} KV cells, the worker has {self._kv_tokens}"
            return NotAdmitted(RefusalReason.NO_ROOM, detail)
        seats = self._max_waiting if may_wait else self._max_sequences
        if len(self._seats) >= seats:
            return NotAdmitted(RefusalReason.NO_ROOM, f"all {seats} seats are taken")
        free = self._kv_tokens - self.promised_tokens
        if not may_wait and tokens > free:
            detail = f"needs {tokens} KV cells, {free} of {self._kv_tokens} are free"
            return NotAdmitted(RefusalReason.NO_ROOM, detail)
        return None

    def obstacle(self, tokens: int, *, may_wait: bool) -> str:
        """Why a job of `tokens` cells would be refused now; empty if it would not."""
        refusal = self._no_seat(tokens, may_wait=may_wait)
        return "" if refusal is None else refusal.detail or refusal.reason

    def past(self, request_id: RequestId, attempt: int) -> bool:
        """Whether this attempt was run here to its end."""
        return (request_id, attempt) in self._past

    def leave(self, request_id: RequestId, attempt: int) -> None:
        """Give the seat back; a late copy of the job is then a duplicate."""
        if self._seats.pop((request_id, attempt), None) is not None:
            _remember(self._past, (request_id, attempt))

    def unseat(self, request_id: RequestId, attempt: int) -> None:
        """Give the seat of a job that never ran back; it may come again."""
        self._seats.pop((request_id, attempt), None)

    def cancel(self, request_id: RequestId, attempt: int) -> tuple[int, ...]:
        """Refuse this and older attempts from now on; gives those that hold a seat."""
        if attempt > self._cancelled.get(request_id, 0):
            self._cancelled[request_id] = attempt
            self._cancelled.move_to_end(request_id)
            while len(self._cancelled) > _REMEMBERED:
                self._cancelled.popitem(last=False)
        return tuple(a for r, a in self._seats if r == request_id and a <= attempt)

    def check(self) -> None:
        """Raise if an invariant is broken."""
        for request_id, attempt in self._seats:
            if (request_id, attempt) in self._past:
                raise AssertionError(f"{request_id}.{attempt} is seated and past")


def _remember(past: OrderedDict[tuple[RequestId, int], None], key: tuple[RequestId, int]) -> None:
    past[key] = None
    while len(past) > _REMEMBERED:
        past.popitem(last=False)
