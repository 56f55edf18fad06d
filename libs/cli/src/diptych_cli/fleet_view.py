"""What one sees of a stack by listening: who is there, how loaded, and how requests fare. Pure."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diptych_bus.port import Gone, Kept
from diptych_contracts.fleet import Beat, WorkerLoad, WorkerRegistration
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import TokenFrame
from diptych_contracts.requests import RecordState, RequestRecord

SILENT_AFTER_S = 1.0
"""A member that has not beaten for so long is shown as silent,"""
FORGOTTEN_AFTER_S = 10.0
"""and after so long not at all."""
WINDOW_S = 3.0
_ORDER = ("gateway", "scheduler", "prefill-worker", "decode-worker", "power-governor")


@dataclass(slots=True)
class Seen:
    """One member. What only workers have is absent elsewhere."""

    beat: Beat
    beat_s: float
    load: WorkerLoad | None = None
    registration: WorkerRegistration | None = None
    tokens: deque[tuple[float, int]] = field(default_factory=deque)

    def tokens_per_s(self, now_s: float, since_s: float) -> float:
        """Tokens it has told of in the window."""
        while self.tokens and self.tokens[0][0] < now_s - WINDOW_S:
            self.tokens.popleft()
        elapsed_s = max(0.1, min(WINDOW_S, now_s - since_s))
        return sum(n for _, n in self.tokens) / elapsed_s


class FleetView:
    """Fed with what the bus says; times are the listener's own.

    Args:
        now_s: When the listening began.
    """

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self._members: dict[Incarnation, Seen] = {}
        self._registrations: dict[str, WorkerRegistration] = {}
        self._records: dict[RequestId, str] = {}

    def beat(self, beat: Beat, now_s: float) -> None:
        """A sign of life."""
        seen = self._members.setdefault(beat.member, Seen(beat, now_s))
        seen.beat, seen.beat_s = beat, now_s

    def load(self, load: WorkerLoad) -> None:
        """A worker's telemetry."""
        if load.worker in self._members:
            self._members[load.worker].load = load

    def tokens(self, frame: TokenFrame, now_s: float) -> None:
        """A worker's newest tokens."""
        if frame.worker in self._members:
            n_tokens = sum(len(entry.token_ids) for entry in frame.entries)
            self._members[frame.worker].tokens.append((now_s, n_tokens))

    def registered(self, change: Kept[WorkerRegistration] | Gone) -> None:
        """What a worker offers."""
        if isinstance(change, Kept):
            self._registrations[change.key] = change.value
        else:
            self._registrations.pop(change.key, None)

    def recorded(self, change: Kept[RequestRecord] | Gone) -> None:
        """What became of a request."""
        if isinstance(change, Gone):
            self._records.pop(RequestId(change.key), None)
            return
        record = change.value
        closed = record.state is RecordState.CLOSED and record.end is not None
        self._records[record.request_id] = (
            record.end.reason if closed and record.end else record.state
        )

    def members(self, now_s: float) -> Iterator[Seen]:
        """Everybody heard of late, service by service."""
        for member in sorted(self._members, key=self._place):
            seen = self._members[member]
            if now_s - seen.beat_s < FORGOTTEN_AFTER_S:
                seen.registration = self._registrations.get(member)
                yield seen

    def requests(self) -> Counter[str]:
        """How many requests are in each state; those that have ended count by how."""
        return Counter(self._records.values())

    def _place(self, member: Incarnation) -> tuple[int, str]:
        service = self._members[member].beat.service
        return (_ORDER.index(service) if service in _ORDER else len(_ORDER), member)
