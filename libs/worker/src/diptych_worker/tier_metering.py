"""The KV tiers' metrics. Tiers count since their start; Prometheus is told what was added."""

from collections.abc import Mapping, Sequence

from prometheus_client import Counter

from diptych_contracts.tiers import TierUsage
from diptych_telemetry.metrics import tiers


class TierMetering:
    """Everything `/metrics` of a worker tells of its tiers."""

    def __init__(self) -> None:
        self._families = tiers()
        self._told: dict[tuple[str, ...], int] = {}

    def measured(self, usages: Sequence[TierUsage], counts: Mapping[str, int]) -> None:
        """Tell how the tiers are now.

        Args:
            usages: Of each tier.
            counts: Of all together: `restored`, `restored_tokens`, `late`, `refused`, `dropped`.
        """
        for usage in usages:
            self._tier(usage)
        families = self._families
        self._add(families.restored_tokens, counts["restored_tokens"], "restored_tokens")
        self._add(families.dropped, counts["dropped"], "dropped")
        for outcome in ("restored", "late", "refused"):
            self._add(families.restores.labels(outcome), counts[outcome], outcome)

    def _tier(self, usage: TierUsage) -> None:
        families, name = self._families, usage.name
        for gauge, value in (
            (families.entries, usage.entries),
            (families.bytes, usage.bytes),
            (families.budget, usage.budget_bytes),
        ):
            if value is not None:
                gauge.labels(name).set(value)
        families.away.labels(name).set(bool(usage.away))
        self._add(families.errors.labels(name), usage.errors, name, "errors")
        for outcome, count in (
            ("hit", usage.hits),
            ("miss", usage.misses),
            ("corrupt", usage.corrupt),
        ):
            self._add(families.reads.labels(name, outcome), count, name, outcome)
        for outcome, count in (
            ("stored", usage.stored),
            ("dropped", usage.dropped),
            ("evicted", usage.evicted),
        ):
            self._add(families.writes.labels(name, outcome), count, name, outcome)

    def _add(self, counter: Counter, count: int, *name: str) -> None:
        counter.inc(max(0, count - self._told.get(name, 0)))
        self._told[name] = count
