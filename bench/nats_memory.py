"""What a request costs nats-server in memory, and when it gives that back.

    python bench/nats_memory.py [--requests 30000] [--minutes 3]

Stores what a request leaves on the bus (the request, erased again; its record, swapped twice and
closed; an event; a frame) as fast as one client can, then waits. The heap is the server's own
figure after a collection; `rss` is what the kernel sees, which Go returns later.
"""

import argparse
import asyncio
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.server import command, config_text, read_port
from diptych_contracts import subjects
from diptych_contracts.events import RequestEnded
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import EndReason, TokenEntry, TokenFrame
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS, REQUESTS, RESUME_WINDOW_S
from diptych_testkit.builders import a_request, an_end
from diptych_testkit.ports import free_port

AT_ONCE = 64
GATEWAY, ME = Incarnation("gateway-1"), Incarnation("scheduler-1")
END = an_end(EndReason.LENGTH)


class Server:
    """A nats-server that can be asked for its heap."""

    def __init__(self, folder: Path) -> None:
        self._profile = free_port()
        config = folder / "nats.conf"
        config.write_text(config_text(folder) + f"prof_port: {self._profile}\n")
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command(config), stdout=log, stderr=log)
        self._folder = folder

    def url(self) -> str:
        while (port := read_port(self._folder, self.process.pid)) is None:
            time.sleep(0.05)
        return f"nats://127.0.0.1:{port}"

    def heap_mb(self) -> float:
        address = f"http://127.0.0.1:{self._profile}/debug/pprof/heap?gc=1&debug=1"
        with urllib.request.urlopen(address, timeout=30) as answer:
            page = answer.read().decode()
        found = re.search(r"# HeapAlloc = (\d+)", page)
        assert found is not None
        return int(found[1]) / 1e6

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        return int(found[1]) * 1024 / 1e6


class Requests:
    """What requests leave on the bus, step by step."""

    def __init__(self, bus: JetStreamBus, count: int) -> None:
        self._bus = bus
        self._records = bus.bucket(REQUEST_RECORDS, RequestRecord)
        self._ids = [RequestId(f"{number:032x}") for number in range(count)]
        self._seqs: dict[RequestId, int] = {}
        self._revisions: dict[RequestId, int] = {}

    async def each(self, step: Callable[[RequestId], Awaitable[None]]) -> None:
        left = iter(self._ids)

        async def some() -> None:
            for request_id in left:
                await step(request_id)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    async def store(self, rid: RequestId) -> None:
        subject = subjects.request("interactive", "m")
        stored = await self._bus.store(subject, a_request(rid), msg_id=rid, timeout_s=5)
        self._seqs[rid] = stored.seq

    async def erase(self, rid: RequestId) -> None:
        await self._bus.erase(REQUESTS.name, self._seqs[rid])

    async def create(self, rid: RequestId) -> None:
        self._revisions[rid] = await self._records.create(rid, _record(rid, RecordState.QUEUED))

    async def route(self, rid: RequestId) -> None:
        await self._swap(rid, RecordState.ROUTED, None)

    async def close(self, rid: RequestId) -> None:
        await self._swap(rid, RecordState.CLOSED, RESUME_WINDOW_S)

    async def announce(self, rid: RequestId) -> None:
        event = RequestEnded(request_id=rid, end=END)
        subject = subjects.event("request_ended")
        await self._bus.store(subject, event, msg_id=f"{rid}.end", timeout_s=5)

    async def journal(self, rid: RequestId) -> None:
        entry = TokenEntry(request_id=rid, attempt=1, index=0, token_ids=(1, 2, 3))
        await self._bus.record(GATEWAY, TokenFrame(worker=ME, entries=(entry,)), timeout_s=5)

    async def _swap(self, rid: RequestId, state: RecordState, ttl_s: float | None) -> None:
        record, seen = _record(rid, state), self._revisions[rid]
        self._revisions[rid] = await self._records.update(rid, record, seen, ttl_s=ttl_s)


def _record(rid: RequestId, state: RecordState) -> RequestRecord:
    end = END if state is RecordState.CLOSED else None
    return RequestRecord(request_id=rid, owner=ME, gateway=GATEWAY, state=state, end=end)


async def measured(server: Server, options: argparse.Namespace) -> None:
    bus = await JetStreamBus.connect(server.url(), name="bench", wait_s=5)
    requests, first_mb = Requests(bus, options.requests), server.heap_mb()

    def show(what: str) -> None:
        heap_mb = server.heap_mb()
        each = (heap_mb - first_mb) * 1e6 / options.requests
        print(
            f"{what:26} heap {heap_mb:7.2f} MB  rss {server.rss_mb():6.1f} MB  {each:6.0f} B each"
        )

    show("empty")
    for step in ("store", "erase", "create", "route", "close", "announce", "journal"):
        await requests.each(getattr(requests, step))
        show(f"after {step}")
    for minute in range(options.minutes):
        await asyncio.sleep(60)
        show(f"{minute + 1} min later")
    await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--minutes", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            asyncio.run(measured(server, options))
        finally:
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    main()
