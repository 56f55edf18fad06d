"""The scheduler's view of the workers: who is registered, alive, and how loaded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from diptych_contracts.fleet import Role, WorkerLoad, WorkerRegistration
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import Report
from diptych_policy.paths import ParkingPlace
from diptych_policy.prefix_index import PrefixIndex
from diptych_policy.prefixes import PromptBlocks

_NEW = 0.2
"""Share of the newest measurement in what is known."""
_LEAST_TOKENS = 32
"""Fewer take a step, whatever a token takes."""


@dataclass(slots=True)
class Worker:
    """One worker. `assigned_*` is what this scheduler gave it and has not seen end."""

    registration: WorkerRegistration
    load: WorkerLoad | None = None
    assigned: int = 0
    assigned_tokens: int = 0
    assigned_prefill_tokens: int = 0
    assigned_parking: dict[str, int] = field(default_factory=dict)
    """Bytes, by kind."""
    prefill_token_s: float = 0.0
    """What a prompt token takes it, as answers that ended tell; 0: not known."""
    last_chosen: int = 0

    @property
    def id(self) -> Incarnation:
        """Its incarnation."""
        return self.registration.worker

    @property
    def sequences(self) -> int:
        """Sequences it holds or will hold: telemetry lags, own assignments do not."""
        reported = self.load.running + self.load.waiting if self.load else 0
        return max(reported, self.assigned)

    @property
    def kv_tokens(self) -> int:
        """KV cells held or promised."""
        return max(self.load.kv_tokens_used if self.load else 0, self.assigned_tokens)

    @property
    def prefill_backlog_tokens(self) -> int:
        """Prompt tokens still to be computed: as last reported, and given since."""
        return (self.load.waiting_tokens if self.load else 0) + self.assigned_prefill_tokens

    @property
    def seat_wait_s(self) -> float | None:
        """How long the next one to park would wait for a seat; None: nobody has, of late."""
        if self.load is None or not self.load.seat_gap_s:
            return None
        return self.load.seat_gap_s * (self.load.parked + 1)

    def kv_bytes(self, tokens: int) -> int:
        """What the KV of so many tokens takes up here, outside the engine."""
        layout = self.registration.layout
        return layout.blocks(tokens) * layout.slot_bytes

    @property
    def parking_places(self) -> dict[str, ParkingPlace]:
        """Where KV can wait here, as last reported, less what was given since."""
        rooms = self.load.parking if self.load is not None else self.registration.parking
        return {
            room.kind: ParkingPlace(
                room.total_bytes - max(room.used_bytes, self.assigned_parking.get(room.kind, 0)),
                room.bytes_per_s,
            )
            for room in rooms
        }

    def has_room(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` would fit now."""
        registration = self.registration
        return (
            self.sequences < registration.max_sequences
            and self.kv_tokens + tokens <= registration.kv_tokens
        )


class Fleet:
    """Registered workers. One counts only while it also beats."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, Worker] = {}
        self._alive: set[Incarnation] = set()
        self._choices = 0
        self._kept_for: dict[RequestId, frozenset[Incarnation]] = {}
        self.blocks = PrefixIndex()
        """What each worker has cached."""

    def register(self, registration: WorkerRegistration) -> None:
        """A worker has published, or refreshed, what it offers."""
        worker = self._workers.get(registration.worker)
        if worker is None:
            self._workers[registration.worker] = Worker(registration)
        else:
            worker.registration = registration

    def offers(self, model: str) -> list[WorkerRegistration]:
        """What every registered worker of `model` offers."""
        known = (worker.registration for worker in self._workers.values())
        return [offer for offer in known if offer.model == model]

    def unregister(self, worker: Incarnation) -> None:
        """A registration has expired or was taken back."""
        self._workers.pop(worker, None)
        self.blocks.forget(worker)

    def registered(self, worker: Incarnation) -> bool:
        """Whether it offers its work; it may be silent for a while."""
        return worker in self._workers

    def found(self, member: Incarnation) -> None:
        """A member beats."""
        self._alive.add(member)

    def lost(self, member: Incarnation) -> None:
        """A member is dead, or as good as."""
        self._alive.discard(member)

    def alive(self, member: Incarnation) -> bool:
        """Whether it beats."""
        return member in self._alive

    def count(self, role: Role) -> int:
        """How many workers of `role` beat."""
        return sum(
            worker.registration.role is role and worker.id in self._alive
            for worker in self._workers.values()
        )

    def report(self, load: WorkerLoad) -> None:
        """A worker's telemetry has arrived."""
        worker = self._workers.get(load.worker)
        if worker is not None:
            worker.load = load

    def prefill_tokens(self, worker: Incarnation, prompt: PromptBlocks, prompt_tokens: int) -> int:
        """Prompt tokens that `worker` would have to compute: those it has not cached."""
        entry = self._workers.get(worker)
        if entry is None or worker not in self.blocks:
            return prompt_tokens
        registration = entry.registration
        size = registration.layout.block_tokens
        hashes = prompt.hashes(registration.fingerprint.base, size)
        overlap = self.blocks.overlap_blocks(worker, hashes) * size
        return max(1, prompt_tokens - overlap)

    def assign(self, worker: Incarnation, tokens: int, *, prefill_tokens: int = 0) -> None:
        """A sequence of `tokens` was given to `worker`, which computes `prefill_tokens` of them."""
        entry = self._workers.get(worker)
        if entry is not None:
            self._choices += 1
            entry.assigned += 1
            entry.assigned_tokens += tokens
            entry.assigned_prefill_tokens += prefill_tokens
            entry.last_chosen = self._choices

    def unassign(self, worker: Incarnation, tokens: int, *, prefill_tokens: int = 0) -> None:
        """A sequence given to `worker` has left it."""
        entry = self._workers.get(worker)
        if entry is not None:
            entry.assigned = max(0, entry.assigned - 1)
            entry.assigned_tokens = max(0, entry.assigned_tokens - tokens)
            entry.assigned_prefill_tokens = max(0, entry.assigned_prefill_tokens - prefill_tokens)

    def prefilled(self, report: Report, tokens: int) -> None:
        """An answer has ended: of a context of `tokens`, `report` says what prefill took."""
        entry = self._workers.get(Incarnation(report.prefill_worker))
        computed = tokens - report.cached_tokens
        if entry is None or computed < _LEAST_TOKENS or report.prefill_ms <= 0:
            return
        seen, before = report.prefill_ms / 1000 / computed, entry.prefill_token_s
        entry.prefill_token_s = before + _NEW * (seen - before) if before else seen

    def park(self, worker: Incarnation, kind: str, n_bytes: int) -> None:
        """Of what was given to `worker`, so much waits there for a seat; negative: no longer."""
        entry = self._workers.get(worker)
        if entry is not None:
            held = entry.assigned_parking.get(kind, 0) + n_bytes
            entry.assigned_parking[kind] = max(0, held)

    def kv_bytes(self, worker: Incarnation, tokens: int) -> int:
        """What the KV of so many tokens takes up at `worker`, outside its engine."""
        entry = self._workers.get(worker)
        return entry.kv_bytes(tokens) if entry is not None else 0

    def keep_for(self, request_id: RequestId, workers: Iterable[Incarnation]) -> None:
        """Give `workers` to nobody else from now on; none: any may have what was kept."""
        if kept := frozenset(workers):
            self._kept_for[request_id] = kept
        else:
            self._kept_for.pop(request_id, None)

    def free_for(self, request_id: RequestId, worker: Incarnation) -> bool:
        """Whether `worker` is kept for no other request than this one."""
        return not any(
            worker in kept for other, kept in self._kept_for.items() if other != request_id
        )

    def usable(self, model: str, role: Role) -> Iterator[Worker]:
        """Workers that serve `model` in `role`, beat, and are not draining."""
        for worker in self._workers.values():
            registration = worker.registration
            draining = worker.load is not None and worker.load.draining
            if (
                registration.model == model
                and registration.role is role
                and worker.id in self._alive
                and not draining
            ):
                yield worker
