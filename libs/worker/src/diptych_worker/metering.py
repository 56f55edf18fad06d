"""A worker's metrics: its load as gauges, its steps and attempts as histograms."""

from diptych_contracts.fleet import WorkerLoad
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.tickets import TicketFault
from diptych_engine.port import EngineSpec, Phase, StepReport
from diptych_kvlink.tallying import TurnedAway
from diptych_kvlink.verifying import Mismatch
from diptych_telemetry.metrics import parking, power, transfers
from diptych_telemetry.worker_metrics import steps, vllm
from diptych_worker.attempts import Attempt

REFUSALS = (*RefusalReason, *Mismatch, *TicketFault, *TurnedAway)
"""Known from the start, so that an alert sees the first one."""


_DEVICE = "0"
"""A worker computes on one."""


class WorkerMetrics:
    """Everything `/metrics` of a worker tells of its work."""

    def __init__(self, model: str, spec: EngineSpec) -> None:
        self._kv_tokens = spec.kv_tokens
        self._model = vllm(model)
        self._steps = steps()
        self._transfers = transfers()
        self._parking = parking()
        self._power = power()
        self._energy_j = 0.0
        self._orphans = self._recomputed = 0
        for reason in REFUSALS:
            self._transfers.refused.labels(reason)
        block_tokens = spec.layout.block_tokens
        self._model.cache_config(
            model_name=model, block_tokens=block_tokens, blocks=spec.kv_tokens // block_tokens
        )

    def load(self, load: WorkerLoad) -> None:
        """The load as it is now."""
        self._model.running.set(load.running)
        self._model.waiting.set(load.waiting)
        self._model.kv_usage_frac.set(load.kv_tokens_used / self._kv_tokens)
        self._transfers.slots_used.set(load.transfer_slots_used)
        self._parking.jobs.set(load.parked)
        for room in load.parking:
            self._parking.used.labels(room.kind).set(room.used_bytes)
            self._parking.total.labels(room.kind).set(room.total_bytes)
        self._watts(load)

    def _watts(self, load: WorkerLoad) -> None:
        source = load.energy_source
        self._power.power.labels(_DEVICE, source).set(load.power_w)
        self._power.cap.labels(_DEVICE).set(load.cap_w)
        grown_j = max(0.0, load.energy_j - self._energy_j)
        self._power.energy.labels(_DEVICE, source).inc(grown_j)
        self._energy_j += grown_j

    def step(self, report: StepReport) -> None:
        """An engine step was computed."""
        tokens = report.prefill_tokens + report.decode_tokens
        if not tokens:
            return
        phase = Phase.PREFILL if report.prefill_tokens else Phase.DECODE
        self._steps.duration.labels(phase).observe(report.duration_s)
        self._steps.batch_tokens.observe(tokens)
        self._model.prompt_tokens.inc(report.prefill_tokens)
        self._model.drafts.inc(report.drafts)
        self._model.accepted_drafts.inc(report.accepted_drafts)

    def started(self, attempt: Attempt) -> None:
        """An attempt has begun, perhaps on a cached prefix."""
        if attempt.phase is not Phase.DECODE:
            generation = attempt.job.generation
            asked = generation.prompt_tokens + len(generation.prefix_ids)
            self._model.prefix_queries.inc(asked)
            self._model.prefix_hits.inc(attempt.cached_tokens)

    def cached(self, tokens: int) -> None:
        """An engine says with its first output only what it had cached."""
        self._model.prefix_hits.inc(tokens)

    def tokens(self, attempt: Attempt, n_tokens: int, now_s: float) -> None:
        """An attempt has new tokens."""
        self._model.generation_tokens.inc(n_tokens)
        if attempt.token_s is not None:
            self._model.inter_token.observe(now_s - attempt.token_s)
        elif attempt.phase is not Phase.DECODE:
            self._model.first_token.observe(now_s - attempt.accepted_s)

    def blocks_handed_over(self, *, sent: int, held: int) -> None:
        """Of a context handed over so many blocks were sent; its reader had the others."""
        self._transfers.blocks.labels("sent").inc(sent)
        self._transfers.blocks.labels("held").inc(held)

    def handed_over(
        self, link: str, n_bytes: int, *, moving_s: float, overlap_frac: float, took_s: float
    ) -> None:
        """A transfer was taken over; its bytes took `moving_s`, a share of it while computing."""
        self._transfers.outcomes.labels(link, "handed_over").inc()
        self._transfers.bytes.labels(link).inc(n_bytes)
        self._transfers.moving.labels(link).inc(moving_s)
        self._transfers.overlapped.labels(link).inc(moving_s * overlap_frac)
        self._transfers.duration.labels(link).observe(took_s)

    def remained(self, link: str, remainder_s: float) -> None:
        """Decode may begin, `remainder_s` after its prefill was computed."""
        self._transfers.remainder.labels(link).observe(remainder_s)

    def engine_gone(self, *, gone: bool) -> None:
        """Whether the engine behind the worker does not answer."""
        self._steps.gone.set(gone)

    def orphans(self, total: int, *, pinned: int, recomputed: int) -> None:
        """Hand-offs nobody took up to now, those still held, and those taken in vain."""
        self._transfers.orphans.inc(total - self._orphans)
        self._orphans = total
        self._transfers.pinned_orphans.set(pinned)
        self._transfers.recomputed.inc(recomputed - self._recomputed)
        self._recomputed = recomputed

    def packed(self, codec: str, raw_bytes: int, took_s: float) -> None:
        """KV of `raw_bytes` was encoded, sealed and handed over."""
        self._transfers.encoded.labels(codec).inc(raw_bytes)
        self._transfers.packing.labels(codec).inc(took_s)

    def unpacked(self, codec: str, took_s: float) -> None:
        """KV was opened and decoded."""
        self._transfers.packing.labels(codec).inc(took_s)

    def transfer_slots(self, *, total: int, quarantined: int) -> None:
        """The room for KV on its way here."""
        self._transfers.slots.set(total)
        self._transfers.slots_quarantined.set(quarantined)

    def kv_refused(self, reason: str, count: int = 1) -> None:
        """A reservation, a hand-off, a write or a connection was refused here."""
        self._transfers.refused.labels(reason).inc(count)

    def parked(self, kind: str, outcome: str, took_s: float) -> None:
        """KV waits no longer: `seated`, `dropped`, or found `corrupt`."""
        self._parking.outcomes.labels(kind, outcome).inc()
        self._parking.waited.labels(kind).observe(took_s)

    def parking_fault(self, kind: str, fault: str) -> None:
        """Room to park was `full`, or failed (`write`, `read`), or gave back `corrupt` KV."""
        self._parking.faults.labels(kind, fault).inc()

    def not_handed_over(self, link: str) -> None:
        """A transfer ended without its peer taking over."""
        self._transfers.outcomes.labels(link, "withdrawn").inc()

    def fell_back(self, link: str) -> None:
        """`link` could not be opened; the attempt goes over the next one."""
        self._transfers.outcomes.labels(link, "fell_back").inc()

    def ended(self, attempt: Attempt, now_s: float) -> None:
        """An attempt has left this worker."""
        self._model.end_to_end.observe(now_s - attempt.accepted_s)
        started_s, first_s = attempt.started_s, attempt.first_token_s
        if started_s is None or first_s is None:
            return
        self._model.queue.observe(started_s - attempt.accepted_s)
        if attempt.phase is not Phase.DECODE:
            self._model.prefill.observe(first_s - started_s)
        if attempt.phase is not Phase.PREFILL:
            self._model.decode.observe(now_s - first_s)
