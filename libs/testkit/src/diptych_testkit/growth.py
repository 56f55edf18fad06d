"""Does memory grow? Samples of a long run in, megabytes out. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MB = 1024 * 1024
LAST_S = 20 * 60.0
"""What counts as the end of a run: two thirds of it if it is shorter than half an hour."""
PER_REQUESTS = 100_000
_EDGE_S = 60.0
"""How much of each edge is averaged, against the noise of a single sample."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    requests: int
    """Ended since the run began."""
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """What a process's memory did."""

    first_mb: float
    """At the beginning of what counts."""
    last_mb: float
    in_the_end_mb: float
    """What it grew over `window_s`, from the mean of its first minute to that of its last."""
    per_100k_mb: float
    """The same window's straight line, by requests."""
    window_s: float
    requests: int
    """Ended within the window."""


def growth(samples: Sequence[Sample]) -> Growth:
    """The growth over the last 20 minutes, or the last two thirds of a shorter run.

    What comes before is warm-up: pools, caches and arenas fill once.

    Raises:
        ValueError: fewer than four samples.
    """
    if len(samples) < 4:
        raise ValueError(f"growth needs at least 4 samples, got {len(samples)}")
    end_s = samples[-1].at_s
    window_s = min(LAST_S, (end_s - samples[0].at_s) * 2 / 3)
    counted = [sample for sample in samples if sample.at_s >= end_s - window_s]
    edge_s = min(_EDGE_S, window_s / 4)
    first = [s for s in counted if s.at_s <= counted[0].at_s + edge_s]
    last = [s for s in counted if s.at_s >= end_s - edge_s]
    return Growth(
        first_mb=_mean_mb(first),
        last_mb=_mean_mb(last),
        in_the_end_mb=_mean_mb(last) - _mean_mb(first),
        per_100k_mb=_slope_mb(counted),
        window_s=window_s,
        requests=counted[-1].requests - counted[0].requests,
    )


def _mean_mb(samples: Sequence[Sample]) -> float:
    return statistics.fmean(sample.rss_bytes for sample in samples) / MB


def _slope_mb(samples: Sequence[Sample]) -> float:
    """Megabytes per 100,000 requests, by least squares; 0 if no request ended."""
    requests = [float(sample.requests) for sample in samples]
    if min(requests) == max(requests):
        return 0.0
    line = statistics.linear_regression(requests, [s.rss_bytes / MB for s in samples])
    return line.slope * PER_REQUESTS
