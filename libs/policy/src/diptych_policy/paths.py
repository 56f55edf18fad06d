"""How a request's KV gets from its prefill to its decode worker: the path, and why that one.

    colocated  one worker does both phases: nothing moves
    dis-gpu    straight into the engine, which keeps a seat from before prefill begins
    dis-cpu    into the decode worker's host memory, where it waits for a seat
    dis-disk   onto the decode worker's disk, where it waits for a seat

Estimated is when the answer can go on, from now: with `w` until a seat falls free, `p` for prefill,
`k/b` for KV over a link or in or out of where it parks:

    colocated  w + p
    dis-gpu    w + p + k/link
    dis-cpu    max(w, p + k/link + k/host) + k/host
    dis-disk   max(w, p + k/link + k/disk) + k/disk

Rules:

1. With a seat free, straight: parking would only add copies. Where moving the KV would break the
   SLO for the first token and computing both phases in one worker would not, colocated.
2. With none free, the roomiest that is in time: disk, then host memory (dearer, and wanted by those
   in a hurry), then waiting for a seat. If nothing is in time, or nothing is said of time, the
   soonest; parking, where that is the same or not known: prefill's work is done meanwhile.
3. A forced path is taken where it has room; a place that is full or out of order is a miss, never
   an error: its request goes straight, or waits.

Measured bandwidths that nobody has measured yet hold up nothing: a link counts as instant, a
place as `UNMEASURED_BYTES_PER_S`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych_contracts.jobs import DecodeJob, GenerateJob, Job, PrefillJob
from diptych_contracts.requests import KvPath, PriorityClass

HOST, DISK = "host", "disk"
PLACES: Mapping[KvPath, str] = {KvPath.DIS_DISK: DISK, KvPath.DIS_CPU: HOST}
"""Where each store-and-forward path parks, the roomiest first."""
UNMEASURED_BYTES_PER_S: Mapping[str, float] = {HOST: 4e9, DISK: 0.5e9}
"""Assumed until measured: a memcpy on a busy core, and a SATA SSD."""


@dataclass(frozen=True, slots=True)
class ParkingPlace:
    """A place at one decode worker where KV can wait."""

    free_bytes: int
    bytes_per_s: float = 0.0
    """Measured, the slower of in and out; 0: not yet."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """One request's KV between two workers, as far as is known."""

    kv_bytes: int
    seat_free: bool
    """Whether the decode worker could keep a seat for it now."""
    seat_wait_s: float | None = None
    """Until it could, if it cannot; None: not known."""
    link_bytes_per_s: float = 0.0
    prefill_s: float = 0.0
    places: Mapping[str, ParkingPlace] = field(default_factory=dict)
    ttft_slo_s: float = 0.0
    """0: none."""


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The path, and why."""

    path: KvPath
    reason: str
    waits: bool = False
    """Whether the request stays with its scheduler until there is a seat for it."""


@dataclass(frozen=True, slots=True)
class PathRules:
    """What an operator says of paths."""

    deployment: KvPath | None = None
    """The one path for all requests that name none; None: chosen by request."""
    ttft_slo_s: Mapping[PriorityClass, float] = field(default_factory=dict)
    """By class; none: 0."""


def parking_of(path: KvPath | None) -> str:
    """Where that path parks; empty: nowhere."""
    return PLACES.get(path, "") if path is not None else ""


def path_of(job: Job) -> KvPath:
    """By which path the KV of `job` goes."""
    match job:
        case GenerateJob():
            return KvPath.COLOCATED
        case PrefillJob(path=path):
            return path or KvPath.DIS_GPU
        case DecodeJob():
            return KvPath.DIS_GPU


def estimate_s(path: KvPath, crossing: Crossing) -> float:
    """When the answer can go on by `path`, from now; infinite where that is not known."""
    link_s = _moving_s(crossing.kv_bytes, crossing.link_bytes_per_s)
    wait_s = _wait_s(crossing)
    match path:
        case KvPath.COLOCATED:
            return wait_s + crossing.prefill_s
        case KvPath.DIS_GPU:
            return wait_s + crossing.prefill_s + link_s
        case KvPath.DIS_CPU | KvPath.DIS_DISK:
            copy_s = _copy_s(crossing, PLACES[path])
            return max(wait_s, crossing.prefill_s + link_s + copy_s) + copy_s


def choose_path(crossing: Crossing) -> PathChoice:
    """The path of a request that insists on none (rules 1 and 2)."""
    return _straight(crossing) if crossing.seat_free else _while_full(crossing)


def _straight(crossing: Crossing) -> PathChoice:
    slo_s = crossing.ttft_slo_s
    took_s = estimate_s(KvPath.DIS_GPU, crossing)
    at_home_s = estimate_s(KvPath.COLOCATED, crossing)
    if slo_s and at_home_s <= slo_s < took_s:
        reason = f"its KV would take {took_s:.3g} s of the {slo_s:g} s for a first token"
        return PathChoice(KvPath.COLOCATED, reason)
    return PathChoice(KvPath.DIS_GPU, "a seat is free")


def _while_full(crossing: Crossing) -> PathChoice:
    roomy = [
        path
        for path, kind in PLACES.items()
        if kind in crossing.places and crossing.places[kind].free_bytes >= crossing.kv_bytes
    ]
    slo_s = crossing.ttft_slo_s
    for path in (*roomy, KvPath.DIS_GPU):
        took_s = estimate_s(path, crossing)
        if slo_s and took_s <= slo_s:
            reason = f"no seat is free; {took_s:.3g} s of {slo_s:g} s"
            return PathChoice(path, reason, waits=path is KvPath.DIS_GPU)
    if not roomy:
        return PathChoice(KvPath.DIS_GPU, "no seat is free and nowhere to park", waits=True)
    soonest = min((*roomy, KvPath.DIS_GPU), key=lambda path: _lateness(path, crossing))
    late = f"nothing is within {slo_s:g} s" if slo_s else "it is the soonest"
    return PathChoice(soonest, f"no seat is free; {late}", waits=soonest is KvPath.DIS_GPU)


def _lateness(path: KvPath, crossing: Crossing) -> tuple[float, bool, float]:
    """Of two that are as late, the one that lets prefill work; of two of these, the quicker."""
    straight = path is KvPath.DIS_GPU
    copy_s = 0.0 if straight else _copy_s(crossing, PLACES[path])
    return estimate_s(path, crossing), straight, copy_s


def _wait_s(crossing: Crossing) -> float:
    if crossing.seat_free:
        return 0.0
    return float("inf") if crossing.seat_wait_s is None else crossing.seat_wait_s


def _copy_s(crossing: Crossing, kind: str) -> float:
    """Once, to where it parks or back."""
    place = crossing.places.get(kind)
    measured = place.bytes_per_s if place is not None else 0.0
    return _moving_s(crossing.kv_bytes, measured or UNMEASURED_BYTES_PER_S[kind])


def _moving_s(n_bytes: int, bytes_per_s: float) -> float:
    return n_bytes / bytes_per_s if bytes_per_s else 0.0
