"""W3C trace context in message headers: injected and extracted here and nowhere else."""

from collections.abc import Mapping

from opentelemetry import propagate
from opentelemetry.context import Context


def with_context(headers: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """`headers` and the current trace context; None if there is neither (a cheaper message)."""
    carrier = dict(headers) if headers else {}
    propagate.inject(carrier)
    return carrier or None


def context_of(headers: Mapping[str, str] | None) -> Context | None:
    """The sender's trace context, or None if it sent none."""
    if not headers or "traceparent" not in headers:
        return None
    return propagate.extract(headers)
