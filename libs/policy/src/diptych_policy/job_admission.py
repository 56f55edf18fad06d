"""Which jobs a worker takes: its own admission is the authority.

Idempotent on (request, attempt): the same job again is a duplicate, whatever became of it. A newer
attempt stands for a fence, so older ones of the same request are to be stopped. A cancelled attempt
that arrives late is refused.

A job may *park* first: its KV waits outside the engine and it has no seat. Once that KV is there it
stands in line, and whoever has stood longest is seated as soon as it fits. Until then nobody else
takes a seat that needs engine room, so the line moves, in order.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from diptych_contracts.ids import RequestId
from diptych_contracts.jobs import RefusalReason

MAX_WAITING = 64
"""Prefill jobs that may wait in a worker's own queue."""
MAX_PARKED = 256
"""Jobs that may park: beyond what bytes allow, each is a task and a prompt in memory."""
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
        max_parked: Jobs that may wait outside of it.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        kv_tokens: int,
        max_waiting: int = MAX_WAITING,
        max_parked: int = MAX_PARKED,
    ) -> None:
        self._max_sequences = max_sequences
        self._kv_tokens = kv_tokens
        self._max_waiting = max_waiting
        self._max_parked = max_parked
        self._seats: dict[tuple[RequestId, int], int] = {}
        self._parked: dict[tuple[RequestId, int], int] = {}
        self._line: dict[tuple[RequestId, int], None] = {}
        self._past: OrderedDict[tuple[RequestId, int], None] = OrderedDict()
        self._cancelled: OrderedDict[RequestId, int] = OrderedDict()
        self.draining = False
        self.out_of_order = ""
        """Why nothing can run here for the time being, if so: its engine is gone, say."""

    def __len__(self) -> int:
        return len(self._seats) + len(self._parked)

    def __iter__(self) -> Iterator[tuple[RequestId, int]]:
        return iter([*self._seats, *self._parked])

    @property
    def parked(self) -> int:
        """Jobs without a seat, whose KV is outside the engine or on its way there."""
        return len(self._parked)

    @property
    def line(self) -> int:
        """Of these, how many wait for nothing but a seat."""
        return len(self._line)

    @property
    def promised_tokens(self) -> int:
        """KV cells all seats may grow to."""
        return sum(self._seats.values())

    def admit(
        self, request_id: RequestId, attempt: int, tokens: int, *, may_wait: bool
    ) -> Admitted | NotAdmitted:
        """Seat a job of up to `tokens` cells; one that may wait needs no room yet."""
        known = self._known(request_id, attempt)
        if known is not None:
            return known
        refusal = self._no_seat(tokens, may_wait=may_wait)
        if refusal is not None:
            return refusal
        stale = self._stale(request_id, attempt)
        self._seats[request_id, attempt] = tokens
        return Admitted(stale=stale)

    def park(self, request_id: RequestId, attempt: int, tokens: int) -> Admitted | NotAdmitted:
        """Take a job of up to `tokens` cells that waits for its seat outside the engine."""
        known = self._known(request_id, attempt)
        if known is not None:
            return known
        refusal = self._not_here(tokens)
        if refusal is not None:
            return refusal
        if len(self._parked) >= self._max_parked:
            return NotAdmitted(RefusalReason.NO_ROOM, f"{self._max_parked} jobs park already")
        stale = self._stale(request_id, attempt)
        self._parked[request_id, attempt] = tokens
        return Admitted(stale=stale)

    def parks(self, request_id: RequestId, attempt: int) -> bool:
        """Whether that job has parked, and no seat yet."""
        return (request_id, attempt) in self._parked

    def line_up(self, request_id: RequestId, attempt: int) -> None:
        """All that a parked job waits for from now on is a seat. Idempotent."""
        if (request_id, attempt) in self._parked:
            self._line.setdefault((request_id, attempt), None)

    def seat_next(self) -> tuple[RequestId, int] | None:
        """Seat whoever has stood in line longest, if it fits; also while draining."""
        key = next(iter(self._line), None)
        if key is None or len(self._seats) >= self._max_sequences or self.out_of_order:
            return None
        if self._parked[key] > self._kv_tokens - self.promised_tokens:
            return None
        del self._line[key]
        self._seats[key] = self._parked.pop(key)
        return key

    def _known(self, request_id: RequestId, attempt: int) -> Admitted | NotAdmitted | None:
        key = (request_id, attempt)
        if key in self._seats or key in self._parked or key in self._past:
            return Admitted(duplicate=True)
        if attempt <= self._cancelled.get(request_id, 0):
            return NotAdmitted(RefusalReason.CANCELLED)
        return None

    def _stale(self, request_id: RequestId, attempt: int) -> tuple[int, ...]:
        return tuple(a for r, a in self if r == request_id and a < attempt)

    def _not_here(self, tokens: int) -> NotAdmitted | None:
        if self.draining:
            return NotAdmitted(RefusalReason.DRAINING)
        if self.out_of_order:
            return NotAdmitted(RefusalReason.NO_ROOM, self.out_of_order)
        if tokens > self._kv_tokens:
            detail = f"needs {tokens} KV cells, the worker has {self._kv_tokens}"
            return NotAdmitted(RefusalReason.NO_ROOM, detail)
        return None

    def _no_seat(self, tokens: int, *, may_wait: bool) -> NotAdmitted | None:
        refusal = self._not_here(tokens)
        if refusal is not None:
            return refusal
        if self._line and not may_wait:
            return NotAdmitted(RefusalReason.NO_ROOM, f"{len(self._line)} parked jobs go first")
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
        if self._take_away(request_id, attempt):
            _remember(self._past, (request_id, attempt))

    def unseat(self, request_id: RequestId, attempt: int) -> None:
        """Give the seat of a job that never ran back; it may come again."""
        self._take_away(request_id, attempt)

    def _take_away(self, request_id: RequestId, attempt: int) -> bool:
        key = (request_id, attempt)
        self._line.pop(key, None)
        tokens = self._parked.pop(key, None)
        return self._seats.pop(key, tokens) is not None

    def cancel(self, request_id: RequestId, attempt: int) -> tuple[int, ...]:
        """Refuse this and older attempts from now on; gives those that are here."""
        if attempt > self._cancelled.get(request_id, 0):
            self._cancelled[request_id] = attempt
            self._cancelled.move_to_end(request_id)
            while len(self._cancelled) > _REMEMBERED:
                self._cancelled.popitem(last=False)
        return tuple(a for r, a in self if r == request_id and a <= attempt)

    def check(self) -> None:
        """Raise if an invariant is broken."""
        for request_id, attempt in self:
            if (request_id, attempt) in self._past:
                raise AssertionError(f"{request_id}.{attempt} is here and past")
        if self._seats.keys() & self._parked.keys():
            raise AssertionError("a parked job has a seat")
        if not self._line.keys() <= self._parked.keys():
            raise AssertionError("who stands in line has parked")


def _remember(past: OrderedDict[tuple[RequestId, int], None], key: tuple[RequestId, int]) -> None:
    past[key] = None
    while len(past) > _REMEMBERED:
        past.popitem(last=False)
