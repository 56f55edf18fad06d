import http.server
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry import propagate, trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from diptych_telemetry import TelemetrySettings, recorded_spans, setup, shutdown, tracer, traces


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    got: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def settings(endpoint: str | None) -> TelemetrySettings:
    return TelemetrySettings(
        service="gateway", incarnation="gateway-1", log_level="error", otlp_endpoint=endpoint
    )


def test_without_an_exporter_a_span_carries_ids_but_records_nothing() -> None:
    traces.start(service="gateway", incarnation="gateway-1", otlp_endpoint=None)
    headers: dict[str, str] = {}
    with tracer("room").start_as_current_span("gateway.accept") as parent:
        propagate.inject(headers)
        with tracer("room").start_as_current_span("scheduler.route") as child:
            assert child.get_span_context().trace_id == parent.get_span_context().trace_id
    assert not parent.is_recording()
    assert parent.get_span_context().is_valid
    assert headers["traceparent"].split("-")[1] == f"{parent.get_span_context().trace_id:032x}"


def test_recorded_spans_are_those_inside_the_with() -> None:
    with recorded_spans() as recorded:
        with tracer("room").start_as_current_span("gateway.accept", attributes={"a": 1}):
            pass
        (span,) = recorded.get_finished_spans()
    with tracer("room").start_as_current_span("gateway.accept"):
        pass
    assert (span.name, dict(span.attributes or {})) == ("gateway.accept", {"a": 1})


def test_a_span_joins_the_remote_trace() -> None:
    remote = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with (
        recorded_spans(),
        tracer("room").start_as_current_span("x", context=propagate.extract(remote)) as span,
    ):
        assert f"{span.get_span_context().trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
        assert span.get_span_context().trace_flags == trace.TraceFlags.SAMPLED


def test_shutdown_sends_what_waits(collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    endpoint, got = collector
    setup(settings(endpoint))
    with tracer("room").start_as_current_span("gateway.accept"):
        pass
    shutdown()
    ((path, body),) = got
    sent = ExportTraceServiceRequest.FromString(body).resource_spans[0]
    assert path == "/v1/traces"
    assert sent.scope_spans[0].spans[0].name == "gateway.accept"
    assert "service.instance.id" in {a.key for a in sent.resource.attributes}


def test_a_collector_that_is_away_does_not_hold_up_the_exit() -> None:
    setup(settings("http://127.0.0.1:9"))
    with tracer("room").start_as_current_span("gateway.accept"):
        pass
    began_s = time.monotonic()
    shutdown()
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize("given", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_endpoint_is_a_base_url_or_the_address_itself(given: str) -> None:
    assert traces.traces_url(given) == "http://c:4318/v1/traces"


def test_a_span_that_failed_says_what_kind_of_error_it_was_and_no_more() -> None:
    with recorded_spans() as recorded:
        with (
            pytest.raises(KeyError),
            tracer("room").start_as_current_span("gateway.accept", attributes={"a": 1}),
        ):
            raise KeyError("xylophone")
        (span,) = recorded.get_finished_spans()
    (event,) = span.events
    assert dict(event.attributes or {}) == {
        "exception.type": "KeyError",
        "exception.escaped": "False",
    }
    assert span.status.status_code is trace.StatusCode.ERROR
    assert dict(span.attributes or {}) == {"a": 1}
    assert span.context is not None
    assert "xylophone" not in span.to_json()
