"""One request is one trace, from the gateway to the last decode step."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = pytest.mark.live

WANTED = {
    "gateway.accept": "gateway",
    "scheduler.route": "scheduler",
    "kv.reserve": "prefill-worker",
    "prefill.run": "prefill-worker",
    "kv.transfer": "prefill-worker",
    "kv.verify": "decode-worker",
    "decode.run": "decode-worker",
}


class Collector(ThreadingHTTPServer):
    """An OTLP/HTTP collector that keeps (trace id, service, span name, attributes)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[bytes, str, str, dict[str, object]]] = []
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next(
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            )
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes: dict[str, object] = {
                        a.key: getattr(a.value, a.value.WhichOneof("value"))
                        for a in span.attributes
                    }
                    self.spans.append((span.trace_id, service, span.name, attributes))


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.take(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        return


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.shutdown()
    collector.server_close()


async def test_one_request_is_one_trace(collector: Collector, tmp_path: Path) -> None:
    stack = LiveStack(tmp_path, patient=True, OTLP_ENDPOINT=collector.endpoint)
    secret = "xylophone"
    try:
        await asyncio.to_thread(stack.start_all)
        async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
            await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Say {secret}."}],
                max_tokens=8,
                extra_body={"diptych": {"mode": "remote"}},
            )
        async with asyncio.timeout(60):  # who is asked to stop has 3 s for what is left
            while not WANTED.keys() <= {name for _, _, name, _ in collector.spans}:
                await asyncio.sleep(0.1)
        pages = [process.page("/metrics") for process in stack.processes]
    finally:
        await asyncio.to_thread(stack.close)
    where = {name: service for _, service, name, _ in collector.spans}
    assert where | WANTED == where
    traces = {name: {t for t, _, n, _ in collector.spans if n == name} for name in WANTED}
    assert all(len(ids) == 1 for ids in traces.values()), traces
    assert len(set.union(*traces.values())) == 1
    transfer = next(a for _, _, name, a in collector.spans if name == "kv.transfer")
    assert transfer["diptych.kv.link"] == "shm"
    assert int(str(transfer["diptych.kv.transfer_bytes"])) > 100_000
    assert transfer["diptych.kv.codec"] == "raw"
    assert float(str(transfer["diptych.kv.gb_per_s"])) > 0
    assert 0 <= float(str(transfer["diptych.kv.overlap_frac"])) <= 1
    remainder_ms = float(str(transfer["diptych.kv.remainder_ms"]))
    decode = next(a for _, _, name, a in collector.spans if name == "decode.run")
    assert remainder_ms > 0
    assert float(str(decode["diptych.kv.remainder_ms"])) > 0
    names = {"kv.reserve", "kv.transfer", "kv.verify"}
    told = {a["diptych.kv.transfer_id"] for _, _, name, a in collector.spans if name in names}
    assert len(told) == 1
    assert secret not in repr(collector.spans)
    assert all(pages)
    assert not [page for page in pages if secret.encode() in page]
    logs = {process.service: process.log.read_text() for process in stack.processes}
    assert all(logs.values())
    assert not [service for service, text in logs.items() if secret in text]
