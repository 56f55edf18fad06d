"""What a soak looks at: processes, streams, gauges."""

import asyncio
import json
import re
import urllib.request
from dataclasses import dataclass, field
from datetime import datetime

import psutil
from nats.aio.client import Client

from diptych_testkit.growth import Sample
from diptych_testkit.live_stack import LiveStack

SERVICES = ("gateway", "scheduler", "prefill-worker", "decode-worker", "power-governor")
_GAUGES = {
    "tasks": "diptych_tasks",
    "owned": "diptych_scheduler_owned_requests",
    "streams": "diptych_gateway_open_streams",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "slots": "diptych_kv_transfer_slots_used",
}


@dataclass(frozen=True, slots=True)
class Look:
    """One process at one moment, but for its memory."""

    fds: int
    threads: int
    gauges: dict[str, float]


@dataclass(frozen=True, slots=True)
class StreamSize:
    """What a stream or bucket holds, and may hold."""

    name: str
    messages: int
    n_bytes: int
    max_bytes: int
    oldest_s: float
    max_age_s: float

    @property
    def within(self) -> bool:
        """Whether it keeps its limits; age is enforced a little late."""
        young = not self.max_age_s or self.oldest_s <= self.max_age_s + 60
        return self.n_bytes <= self.max_bytes and young


@dataclass(slots=True)
class Watched:
    """One process, over time."""

    name: str
    process: psutil.Process
    health_port: int | None
    samples: list[Sample] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)

    def look(self, at_s: float, requests: int) -> None:
        """Take a sample."""
        with self.process.oneshot():
            memory = self.process.memory_info().rss
            fds, threads = self.process.num_fds(), self.process.num_threads()
        self.samples.append(Sample(at_s, requests, memory))
        self.looks.append(Look(fds, threads, self.gauges()))

    def gauges(self) -> dict[str, float]:
        """What its metrics say now."""
        if self.health_port is None:
            return {}
        url = f"http://127.0.0.1:{self.health_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for name, metric in _GAUGES.items():
            values = re.findall(rf"^{metric}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE)
            if values:
                found[name] = sum(map(float, values))
        return found


def everybody(stack: LiveStack) -> list[Watched]:
    """The services and the bus."""
    services = [
        Watched(name, psutil.Process(process.popen.pid), process.health_port)
        for name in SERVICES
        for process in [stack.of(name)]
    ]
    return [*services, Watched("nats-server", psutil.Process(stack.nats.pid), None)]


async def stream_sizes(stack: LiveStack) -> list[StreamSize]:
    """Every stream and bucket of the server."""
    client = await stack.client()
    try:
        listed = json.loads((await client.request("$JS.API.STREAM.NAMES", b"", 5)).data)
        names = sorted(listed["streams"])
        return await asyncio.gather(*(_stream_size(client, name) for name in names))
    finally:
        await client.close()


async def _stream_size(client: Client, name: str) -> StreamSize:
    info = json.loads((await client.request(f"$JS.API.STREAM.INFO.{name}", b"", 5)).data)
    state, config = info["state"], info["config"]
    seconds_old = 0.0
    if state["messages"]:
        seconds_old = _unix_s(info["ts"]) - _unix_s(state["first_ts"])
    return StreamSize(
        name=name,
        messages=state["messages"],
        n_bytes=state["bytes"],
        max_bytes=config["max_bytes"],
        oldest_s=seconds_old,
        max_age_s=config["max_age"] / 1e9,
    )


def _unix_s(stamp: str) -> float:
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")
