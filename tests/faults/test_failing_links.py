"""KV links that fail: the request goes over another one, or another way, and nobody notices."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diptych_contracts.errors import Incompatible, LinkBroken
from diptych_contracts.fleet import Role
from diptych_contracts.requests import Forced
from diptych_kvlink import shm
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.nixl_library import why_absent
from diptych_kvlink.nixl_writer import NixlWriter
from diptych_kvlink.tcp_listening import stop_listening
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.tcp_writer import TcpWriter
from diptych_telemetry import names
from diptych_telemetry.metrics import render
from diptych_telemetry.traces import recorded_spans
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import toy_answer

PROMPT = tuple(range(1, 301))
needs_nixl = pytest.mark.skipif(bool(why_absent()), reason="NIXL is not here: make nixl")
ORDERS = [
    ("shm", "tcp"),
    ("tcp", "shm"),
    pytest.param(("shm", "nixl", "tcp"), marks=needs_nixl, id="shm-nixl-tcp"),
    pytest.param(("nixl", "tcp", "shm"), marks=needs_nixl, id="nixl-tcp-shm"),
    pytest.param(("tcp", "shm", "nixl"), marks=needs_nixl, id="tcp-shm-nixl"),
]


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    with recorded_spans() as recorded:
        yield recorded


async def a_pair(fleet: SmallFleet, **settings: Any) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, **settings)
    fleet.worker("d1", Role.DECODE, **settings)
    await fleet.ready()


def out_of_reach(*_: object) -> None:
    raise Incompatible("cannot open the pool")


async def answered(fleet: SmallFleet, name: str, **request: Any) -> str:
    """The link that carried a request, its answer checked."""
    await fleet.client.send(a_request(name, prompt_ids=PROMPT, **request))
    end = await fleet.client.ended(name)
    assert fleet.client.delivered[name] == toy_answer(PROMPT, 16), end
    assert end.report is not None
    return end.report.link


async def test_shared_memory_out_of_reach_falls_back_to_tcp_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two containers of one host may believe that they share memory."""
    monkeypatch.setattr(shm, "map_pool", out_of_reach)
    before = metric("kv_transfers_total", link="shm", outcome="fell_back")
    async with small_fleet() as fleet:
        await a_pair(fleet, links=("shm", "tcp"))
        assert await answered(fleet, "r1") == "tcp"
        assert fleet.client.views["r1"].attempt == 1
        await fleet.settled()
    assert metric("kv_transfers_total", link="shm", outcome="fell_back") == before + 1


@needs_nixl
@pytest.mark.parametrize("nixl_too", [False, True])
async def test_a_dead_link_falls_to_the_next_until_one_carries(
    monkeypatch: pytest.MonkeyPatch, nixl_too: bool
) -> None:
    monkeypatch.setattr(shm, "map_pool", out_of_reach)
    if nixl_too:
        monkeypatch.setattr(NixlWriter, "connect", out_of_reach)
    async with small_fleet() as fleet:
        await a_pair(fleet, links=("shm", "nixl", "tcp"))
        assert await answered(fleet, "r1") == ("tcp" if nixl_too else "nixl")
        assert fleet.client.views["r1"].attempt == 1
        await fleet.settled()


@pytest.fixture
def incoming(monkeypatch: pytest.MonkeyPatch) -> dict[str, IncomingTransfers]:
    """Every worker's, by its short name."""
    made: dict[str, IncomingTransfers] = {}
    init = IncomingTransfers.__init__

    def noting(self: IncomingTransfers, *args: Any, name: str, **more: Any) -> None:
        init(self, *args, name=name, **more)
        made[name.partition("-")[0]] = self

    monkeypatch.setattr(IncomingTransfers, "__init__", noting)
    return made


def end_transport(incoming: IncomingTransfers, kind: str) -> None:
    """For good, and nothing else of the worker."""
    (target,) = (t for t in incoming._held.targets if t.endpoint.kind == kind)
    ended: Any = target
    if kind == "shm":
        ended._path.unlink()
    elif kind == "nixl":
        ended._plane.close()
    else:
        stop_listening(ended._listener)
        ended._callers.hang_up()
        ended._listener.close()


@pytest.mark.parametrize("links", ORDERS)
@pytest.mark.parametrize("used", [False, True])
async def test_links_whose_transport_dies_fall_to_the_next_one_counted_and_traced(
    links: tuple[str, ...],
    used: bool,
    incoming: dict[str, IncomingTransfers],
    spans: InMemorySpanExporter,
) -> None:
    """Their decode worker lives on. The last one's death leaves no link: no KV crosses then."""
    before = {link: fallen(link) for link in links}
    async with small_fleet() as fleet:
        await a_pair(fleet, links=links)
        for number, link in enumerate(links):
            if used:
                assert await answered(fleet, f"a{number}") == link
            end_transport(incoming["d1"], link)
            expected = links[number + 1] if number + 1 < len(links) else ""
            # Under way a death fails the attempt, which then may go on without any link.
            for again in range(20):
                spans.clear()
                if (over := await answered(fleet, f"b{number}-{again}")) == expected:
                    break
                assert over == ""
            assert over == expected
            if expected:
                assert fallen(link) > before[link]
                assert (expected, True) in reservations(spans)
            await fleet.settled()
        assert metric("kv_transfers_total", link=links[0], outcome="fell_back") > 0


def fallen(link: str) -> float:
    return metric("kv_transfers_total", link=link, outcome="fell_back")


def reservations(spans: InMemorySpanExporter) -> list[tuple[Any, Any]]:
    """Of each: over which link, and whether that was not the first choice."""
    found = [s.attributes or {} for s in spans.get_finished_spans() if s.name == names.KV_RESERVE]
    return [(seen[names.LINK], seen[names.LINK_FELL_BACK]) for seen in found]


async def test_a_listener_out_of_reach_falls_back_to_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(_self: TcpWriter) -> None:
        raise LinkBroken("cannot connect")

    monkeypatch.setattr(TcpWriter, "connect", unreachable)
    async with small_fleet() as fleet:
        await a_pair(fleet, links=("tcp", "shm"))
        assert await answered(fleet, "r1") == "shm"
        assert fleet.client.views["r1"].attempt == 1
        await fleet.settled()


async def test_a_forced_link_out_of_reach_is_not_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "map_pool", out_of_reach)
    async with small_fleet() as fleet:
        await a_pair(fleet)
        assert await answered(fleet, "r1", forced=Forced(link="shm")) == ""
        assert fleet.client.views["r1"].attempt > 1
        await fleet.settled()


@pytest.mark.parametrize("links", [("shm",), ("tcp",)])
async def test_workers_with_one_link_use_that(links: tuple[str, ...]) -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet, links=links)
        assert (await answered(fleet, "r1"),) == links
        await fleet.settled()


@pytest.mark.parametrize("seed", range(10))
async def test_a_tcp_link_that_breaks_now_and_then_changes_no_answer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, send_all = Random(seed), TcpStream.send_all

    def break_sometimes(stream: TcpStream, buffers: Sequence[bytes | memoryview]) -> None:
        if rng.random() < 0.15:
            stream.hang_up()
        send_all(stream, buffers)

    monkeypatch.setattr(TcpStream, "send_all", break_sometimes)
    async with small_fleet() as fleet:
        await a_pair(fleet)
        names = [f"r{number}" for number in range(6)]
        forced = Forced(link="tcp")
        for name in names:
            await fleet.client.send(a_request(name, prompt_ids=PROMPT, forced=forced))
        for name in names:
            await fleet.client.ended(name)
            assert fleet.client.delivered[name] == toy_answer(PROMPT, 16)
        await fleet.settled()


def metric(name: str, **labels: str) -> float:
    wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
    start = f"diptych_{name}{{{wanted}}} "
    lines = [line for line in render().decode().splitlines() if line.startswith(start)]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0
