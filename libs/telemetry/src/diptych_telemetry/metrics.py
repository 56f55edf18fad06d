"""Prometheus metrics: a family per room, made when its process first asks for it.

So a scheduler's `/metrics` holds no gateway families that stay zero for ever. Labels hold small
closed sets only (mode, link, outcome, model), never a request id. Names end in their unit.
"""

from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

REGISTRY: Final = CollectorRegistry()
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

# OpenTelemetry's buckets for generative-AI servers: comparable across products.
DURATION_BUCKETS_S: Final = tuple(0.01 * 2**n for n in range(14))
FIRST_TOKEN_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_BUCKETS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5),
)


def render() -> bytes:
    """Everything this process measures, in Prometheus's text format."""
    return generate_latest(REGISTRY)


def counter(name: str, text: str, *labels: str) -> Counter:
    """A counter of ours; `name` without the prefix `diptych_`."""
    return Counter(f"diptych_{name}", text, labels, registry=REGISTRY)


def gauge(name: str, text: str, *labels: str) -> Gauge:
    """A gauge of ours; `name` without the prefix `diptych_`."""
    return Gauge(f"diptych_{name}", text, labels, registry=REGISTRY)


def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
    """A histogram of ours; `name` without the prefix `diptych_`."""
    return Histogram(f"diptych_{name}", text, labels, registry=REGISTRY, buckets=buckets)


class ProcessMetrics:
    """What every process knows of itself."""

    def __init__(self) -> None:
        self.ready = gauge("ready", "1 while the process serves.")
        self.bus_connected = gauge("bus_connected", "1 while the bus is there.")
        self.tasks = gauge("tasks", "Tasks of the service's event loop.")
        self.beats = counter("beats_total", "Signs of life sent.")
        self.orders_refused = counter(
            "orders_refused_total", "Orders that were not obeyed, by why.", "reason"
        )


class GatewayMetrics:
    """What clients experience."""

    def __init__(self) -> None:
        self.requests = counter(
            "gateway_requests_total", "HTTP requests answered.", "endpoint", "status"
        )
        self.ended = counter(
            "gateway_ended_total", "Generations ended, by reason.", "model", "reason"
        )
        self.open_streams = gauge("gateway_open_streams", "Generations being delivered.")
        self.forged = counter(
            "gateway_forged_entries_total",
            "Journal entries dropped because their voice had no right to say them.",
        )
        self.duration = histogram(
            "gateway_request_duration_seconds",
            "From the request's arrival to its last byte.",
            "model",
            buckets=DURATION_BUCKETS_S,
        )
        self.first_token = histogram(
            "gateway_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            "model",
            buckets=FIRST_TOKEN_BUCKETS_S,
        )
        self.inter_token = histogram(
            "gateway_inter_token_latency_seconds",
            "Between two tokens of one answer.",
            "model",
            buckets=PER_TOKEN_BUCKETS_S,
        )


class SchedulerMetrics:
    """What the scheduler holds and decides."""

    def __init__(self) -> None:
        self.queued = gauge("scheduler_queued_requests", "Requests waiting for a worker.")
        self.owned = gauge("scheduler_owned_requests", "Open requests this replica answers for.")
        self.routed = counter("scheduler_routed_total", "Attempts sent to workers.", "mode")
        self.paths = counter(
            "scheduler_paths_total", "Attempts sent to workers, by how their KV moves.", "path"
        )
        self.refused = counter("scheduler_refused_total", "Jobs refused by workers.", "reason")
        self.fences = counter("scheduler_fences_total", "New attempts begun with a fence.")
        self.forged = counter(
            "scheduler_forged_entries_total",
            "Journal entries dropped because their voice had no right to say them.",
        )
        self.adoptions = counter("scheduler_adoptions_total", "Records taken over.")
        self.members_lost = counter("scheduler_members_lost_total", "Members declared dead.")
        self.members_returned = counter(
            "scheduler_members_returned_total",
            "Members that beat again after they were declared dead: frozen ones and false alarms.",
        )
        self.dead = counter(
            "scheduler_dead_requests_total", "Requests that were given up as failed.", "cause"
        )
        self.workers = gauge("scheduler_workers", "Workers believed alive.", "role")
        self.route_duration = histogram(
            "scheduler_route_duration_seconds",
            "From taking a request on to a worker's acceptance of its first attempt.",
            buckets=FIRST_TOKEN_BUCKETS_S,
        )


class TransferMetrics:
    """KV on its way between workers."""

    def __init__(self) -> None:
        self.bytes = counter("kv_transfer_bytes_total", "KV bytes written.", "link")
        self.blocks = counter(
            "kv_handed_over_blocks_total",
            "KV blocks of contexts handed over: `sent`, or `held` by the decode worker already.",
            "how",
        )
        self.moving = counter(
            "kv_transfer_moving_seconds_total",
            "Time spent on moving KV bytes: export, checksum, send and acknowledgement.",
            "link",
        )
        self.overlapped = counter(
            "kv_transfer_overlapped_seconds_total",
            "Of it, what ran while the engine still computed the same prompt.",
            "link",
        )
        self.remainder = histogram(
            "kv_remainder_seconds",
            "From the end of prefill's compute until decode may begin: what was not overlapped.",
            "link",
            buckets=FIRST_TOKEN_BUCKETS_S,
        )
        self.outcomes = counter("kv_transfers_total", "Transfers ended.", "link", "outcome")
        self.refused = counter(
            "kv_refused_total",
            "Reservations, hand-offs, writes and connections a worker refused, by reason.",
            "reason",
        )
        self.encoded = counter(
            "kv_encoded_bytes_total", "KV handed over, before it was encoded.", "codec"
        )
        self.packing = counter(
            "kv_packing_seconds_total", "Encoding and sealing of KV, and the way back.", "codec"
        )
        self.slots = gauge("kv_transfer_slots", "Block slots in all.")
        self.slots_quarantined = gauge(
            "kv_transfer_slots_quarantined", "Slots of ended tickets that somebody may still touch."
        )
        self.slots_used = gauge("kv_transfer_slots_used", "Block slots held by tickets.")
        self.orphans = counter(
            "kv_orphans_total", "Hand-offs an engine offered and no decode worker took."
        )
        self.recomputed = counter(
            "kv_recomputed_total", "Hand-offs whose KV the decode engine computed again."
        )
        self.pinned_orphans = gauge(
            "kv_pinned_orphans", "Of these, how many whose KV its engine still holds."
        )
        self.duration = histogram(
            "kv_transfer_duration_seconds",
            "From the end of prefill to the peer's acceptance.",
            "link",
            buckets=FIRST_TOKEN_BUCKETS_S,
        )


class ParkingMetrics:
    """KV that waits at a decode worker for a seat in its engine."""

    def __init__(self) -> None:
        self.jobs = gauge("kv_parked_jobs", "Jobs without a seat: parked, or on their way.")
        self.used = gauge("kv_parked_bytes", "Room held for parked KV.", "parking")
        self.total = gauge(
            "kv_parked_capacity_bytes", "Room in all; 0 while it is out of order.", "parking"
        )
        self.outcomes = counter("kv_parked_total", "Parked KV that left.", "parking", "outcome")
        self.faults = counter("kv_parked_faults_total", "Parking that failed.", "parking", "fault")
        self.waited = histogram(
            "kv_parked_duration_seconds",
            "From acceptance to the seat, or to the end.",
            "parking",
            buckets=DURATION_BUCKETS_S,
        )


class TierMetrics:
    """KV kept beyond the engine."""

    def __init__(self) -> None:
        self.entries = gauge("kv_tier_entries", "Blocks in a tier, where it says so.", "tier")
        self.bytes = gauge("kv_tier_bytes", "Bytes in a tier, where it says so.", "tier")
        self.budget = gauge("kv_tier_budget_bytes", "What a tier may hold, if limited.", "tier")
        self.away = gauge("kv_tier_away", "1 while a tier is left alone: it failed.", "tier")
        self.reads = counter(
            "kv_tier_reads_total", "Blocks looked for in a tier, by outcome.", "tier", "outcome"
        )
        self.errors = counter(
            "kv_tier_errors_total", "Calls a tier did not answer, or refused.", "tier"
        )
        self.writes = counter(
            "kv_tier_writes_total", "Blocks for a tier, by outcome.", "tier", "outcome"
        )
        self.restored_tokens = counter(
            "kv_tier_restored_tokens_total", "Tokens whose KV was read instead of computed."
        )
        self.restores = counter(
            "kv_tier_restores_total",
            "Prompts begun with KV out of a tier; of those that were not: read too late, refused "
            "by the engine.",
            "outcome",
        )
        self.dropped = counter(
            "kv_tier_dropped_total", "Blocks to be written that found no room on the way."
        )


class PowerMetrics:
    """Watts and joules, and where they were read."""

    def __init__(self) -> None:
        self.power = gauge("device_power_watts", "Power drawn now.", "device", "source")
        self.cap = gauge("device_power_cap_watts", "Power set-point in force.", "device")
        self.energy = counter("device_energy_joules_total", "Energy used.", "device", "source")
        self.set_points = counter("power_set_points_total", "Set-points sent.")


@cache
def process() -> ProcessMetrics:
    """The families of this process itself."""
    return ProcessMetrics()


@cache
def gateway() -> GatewayMetrics:
    """The gateway's families."""
    return GatewayMetrics()


@cache
def scheduler() -> SchedulerMetrics:
    """The scheduler's families."""
    return SchedulerMetrics()


@cache
def tiers() -> TierMetrics:
    """The families of the KV tiers."""
    return TierMetrics()


@cache
def transfers() -> TransferMetrics:
    """The KV link's families."""
    return TransferMetrics()


@cache
def parking() -> ParkingMetrics:
    """The families of parked KV."""
    return ParkingMetrics()


@cache
def power() -> PowerMetrics:
    """The families of devices."""
    return PowerMetrics()
