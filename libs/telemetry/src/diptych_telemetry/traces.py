"""Spans: recorded while somebody reads them, otherwise only ids that travel along.

One tracer provider serves the process for its whole life. Exporters come and go behind `_Fanout`;
while there is none, the sampler drops every span: it then costs a few microseconds and still
carries trace and span ids to the next hop.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, Status, TraceState
from opentelemetry.util.types import Attributes

from diptych_telemetry.names import SCHEMA_URL

_EXPORT_TIMEOUT_S = 3
_FLUSH_TIMEOUT_MS = 3000


def tracer(name: str) -> trace.Tracer:
    """A tracer for one module. Works before `setup`, too: it joins the provider set up later."""
    return trace.get_tracer(name, schema_url=SCHEMA_URL)


def start(*, service: str, incarnation: str, otlp_endpoint: str | None) -> None:
    """Export this process's spans to `otlp_endpoint` (OTLP/HTTP), if there is one."""
    _provide(service, incarnation)
    stop()
    if otlp_endpoint:
        exporter = OTLPSpanExporter(endpoint=traces_url(otlp_endpoint), timeout=_EXPORT_TIMEOUT_S)
        _exporting.append(_fanout.add(BatchSpanProcessor(exporter)))


def stop() -> None:
    """Flush and end what `start` began."""
    while _exporting:
        processor = _exporting.pop()
        processor.force_flush(_FLUSH_TIMEOUT_MS)
        _fanout.remove(processor)
        processor.shutdown()


@contextmanager
def recorded_spans() -> Iterator[InMemorySpanExporter]:
    """For tests: keep the spans ended inside the `with`; read them by `get_finished_spans()`."""
    _provide("test", "test")
    exporter = InMemorySpanExporter()
    processor = _fanout.add(SimpleSpanProcessor(exporter))
    try:
        yield exporter
    finally:
        _fanout.remove(processor)
        processor.shutdown()


def traces_url(endpoint: str) -> str:
    """Where a collector takes traces: `endpoint` is its base URL or already that address."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


class _Fanout(SpanProcessor):
    """Hands spans to the processors of the moment."""

    def __init__(self) -> None:
        self.targets: tuple[SpanProcessor, ...] = ()

    def add(self, processor: SpanProcessor) -> SpanProcessor:
        self.targets = (*self.targets, processor)
        return processor

    def remove(self, processor: SpanProcessor) -> None:
        self.targets = tuple(p for p in self.targets if p is not processor)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        for target in self.targets:
            target.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        span = _discreet(span)
        for target in self.targets:
            target.on_end(span)

    def force_flush(self, timeout_millis: int = _FLUSH_TIMEOUT_MS) -> bool:
        return all(target.force_flush(timeout_millis) for target in self.targets)


_REPEATING = frozenset({"exception.message", "exception.stacktrace"})


def _discreet(span: ReadableSpan) -> ReadableSpan:
    """`span` without the messages of exceptions: they may repeat what somebody wrote."""
    if not span.events and not span.status.description:
        return span
    events = [
        Event(
            event.name,
            {k: v for k, v in (event.attributes or {}).items() if k not in _REPEATING},
            event.timestamp,
        )
        for event in span.events
    ]
    return ReadableSpan(
        name=span.name,
        context=span.get_span_context(),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=events,
        links=span.links,
        kind=span.kind,
        instrumentation_scope=span.instrumentation_scope,
        status=Status(span.status.status_code),
        start_time=span.start_time,
        end_time=span.end_time,
    )


class _WhileWatched(Sampler):
    """Records every span while there is somebody to read it."""

    def __init__(self, fanout: _Fanout) -> None:
        self._fanout = fanout

    # The signature is OpenTelemetry's.
    def should_sample(  # noqa: PLR0913
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
        **_: Any,
    ) -> SamplingResult:
        decision = Decision.RECORD_AND_SAMPLE if self._fanout.targets else Decision.DROP
        parent = trace.get_current_span(parent_context).get_span_context()
        return SamplingResult(decision, attributes, trace_state or parent.trace_state)

    def get_description(self) -> str:
        return "WhileWatched"


_fanout = _Fanout()
_exporting: list[SpanProcessor] = []


_provided: list[TracerProvider] = []


def _provide(service: str, incarnation: str) -> None:
    """Make the process's provider. OpenTelemetry takes one: the first identity stays."""
    if _provided:
        return
    identity = {
        "service.namespace": "diptych",
        "service.name": service,
        "service.instance.id": incarnation,
    }
    provider = TracerProvider(
        resource=Resource.create(identity), sampler=_WhileWatched(_fanout), shutdown_on_exit=False
    )
    provider.add_span_processor(_fanout)
    trace.set_tracer_provider(provider)
    _provided.append(provider)
