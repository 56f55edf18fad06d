"""The gateway's metrics with their labels bound once per model."""

from functools import cache

from prometheus_client import Counter

from diptych_contracts.usage import Used
from diptych_telemetry import metrics


class ModelMetrics:
    """What clients of one model experience."""

    def __init__(self, model: str) -> None:
        families = metrics.gateway()
        self._model = model
        self._ended = families.ended
        self.duration = families.duration.labels(model)
        self.first_token = families.first_token.labels(model)
        self.inter_token = families.inter_token.labels(model)
        self.prompt_tokens = _tokens().labels(model, "prompt")
        self.answer_tokens = _tokens().labels(model, "answer")

    def ended(self, reason: str) -> None:
        """Count a generation's end."""
        self._ended.labels(self._model, reason).inc()


@cache
def of_model(model: str) -> ModelMetrics:
    """The metrics of `model`, one that is served: a closed set."""
    return ModelMetrics(model)


def refused(reason: str, priority_class: str) -> None:
    """Count a request that was not taken, by why."""
    _refused().labels(reason, priority_class).inc()


def answered(endpoint: str, status: int) -> None:
    """Count an HTTP answer; `endpoint` is a route, never a path from outside."""
    metrics.gateway().requests.labels(endpoint, str(status)).inc()


@cache
def _refused() -> Counter:
    return metrics.counter(
        "gateway_refused_total", "Requests not taken, by why.", "reason", "priority_class"
    )


@cache
def _tokens() -> Counter:
    return metrics.counter("gateway_tokens_total", "Tokens read and written.", "model", "kind")


MAX_TENANTS = 200
"""Tenants with series of their own; later ones are summed as `other`."""
_tenants: set[str] = set()


def metered(tenant: str, used: Used) -> None:
    """Count what a tenant used."""
    if tenant not in _tenants and len(_tenants) >= MAX_TENANTS:
        tenant = "other"  # a tenant of that name shares its series
    _tenants.add(tenant)
    for kind in Used.__struct_fields__:
        _usage().labels(tenant, kind).inc(getattr(used, kind))


@cache
def _usage() -> Counter:
    return metrics.counter(
        "gateway_usage_total",
        "What tenants used, as this gateway summed it into the books: add all gateways'.",
        "tenant",
        "kind",
    )
