"""KV over every link: two hundred prompts, each answered as one bare engine answers it.

`make equality` sends 200 prompts of 1 to 2,000 tokens over every link (DIPTYCH_EQUALITY_HAND_OFFS);
otherwise it is a few short ones. Lengths are even on a logarithmic scale, both ends included.

A crowd of prompts goes over one link, then over the next; which is first takes turns. So each
link has its share of prompts whose blocks leave while the next chunk computes; of the others the
prefill worker has the KV already, and all blocks leave at once. All of it crosses each time: a
decode worker keeps nothing of what it was handed. The bare engine computes meanwhile, each prompt
once for all links.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from diptych_bus.port import Bus
from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot, KvTransfer
from diptych_contracts.ids import Incarnation, RequestId, new_incarnation, new_request_id
from diptych_contracts.journal import End, EndReason, Report
from diptych_contracts.requests import Deadlines, Forced, Mode
from diptych_contracts.sampling import Stopping
from diptych_kvlink.ledger import State
from diptych_kvlink.links import KINDS, TCP, LinkSettings, offered
from diptych_testkit.bare_engine import BareEngine
from diptych_testkit.builders import a_request
from diptych_testkit.bus_client import BusClient
from diptych_testkit.live_model import bare_engine, codec
from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_worker.settings import WorkerSettings

pytestmark = [pytest.mark.live, pytest.mark.timeout(4 * 3600)]

N_PROMPTS = int(os.environ.get("DIPTYCH_EQUALITY_HAND_OFFS", "6"))
WHOLE = N_PROMPTS >= 100
LONGEST = 2000 if WHOLE else 400
ANSWER_TOKENS = 20
CROWD, CROWD_TOKENS = 12, 3500
"""A prefill worker keeps 4,096 tokens for prompts that begin alike: those of one crowd."""
ROOM_BYTES = str(256 << 20)
"""Parked KV of more than a crowd."""
PATIENCE_S = 1800.0
UNHURRIED = Deadlines(first_token_s=PATIENCE_S, inter_token_s=300.0, transfer_s=300.0)
"""Nothing here is about time, and the machine may be busy."""
PAGES = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
Expected = list[Future[list[int]]]
LINKS = offered(LinkSettings(kinds=KINDS))
"""Over NIXL too where it is installed (make nixl)."""


PARKS = "kv_parking_host_bytes" in {setting.name for setting in fields(WorkerSettings)}


class Way(NamedTuple):
    """How KV goes."""

    link: str
    path: str = ""
    """Where it waits for a seat; empty: nowhere."""

    def __str__(self) -> str:
        return "-".join(filter(None, self))


@dataclass(frozen=True)
class Fleet:
    """A stack, and the ways KV goes in it."""

    name: str
    ways: tuple[Way, ...]
    every: int = 1
    """Of the prompts each so-manieth."""
    workers: Mapping[str, str] = field(default_factory=dict)
    sealed: bool = False

    @property
    def numbers(self) -> range:
        return range(0, N_PROMPTS, self.every)


def fleets() -> list[Fleet]:
    """One for all ways; the whole suite has another one whose KV is sealed."""
    ways, rooms = [Way(link) for link in LINKS], {}
    if PARKS:
        ways += [Way(link, path) for link in ("shm", "tcp") for path in ("dis-cpu", "dis-disk")]
        rooms = {"KV_PARKING_HOST_BYTES": ROOM_BYTES, "KV_PARKING_DISK_BYTES": ROOM_BYTES}
    found = [Fleet("plain", tuple(ways), workers=rooms)]
    if WHOLE:
        clear = tuple(Way(link) for link in LINKS if link != TCP)
        found.append(Fleet("sealed", clear, 4, {"KV_SEAL": "required"}, sealed=True))
    return found


FLEETS = {fleet.name: fleet for fleet in fleets()}
WAYS = [
    pytest.param(fleet.name, way, id=f"{fleet.name}-{way}")
    for fleet in FLEETS.values()
    for way in fleet.ways
]


@cache
def prompts() -> list[tuple[int, ...]]:
    """The lengths' logarithms are even; the texts are lines of the documentation, at random."""
    lines = [line for page in PAGES for line in page.read_text().splitlines() if len(line) > 40]
    found = []
    for number in range(N_PROMPTS):
        length = round(LONGEST ** (number / (N_PROMPTS - 1)))
        text = " ".join(Random(number).choices(lines, k=length // 8 + 4))
        found.append(tuple(codec().encode(text)[:length]))
        assert len(found[-1]) == length
    return found


def crowds(numbers: Sequence[int]) -> list[list[int]]:
    """Prompts that are sent together: long and short ones, as many as are kept at once."""
    found: list[list[int]] = [[]]
    for number in Random(1).sample(numbers, k=len(numbers)):
        tokens = sum(len(prompts()[n]) for n in [*found[-1], number])
        if tokens > CROWD_TOKENS or len(found[-1]) == CROWD:
            found.append([])
        found[-1].append(number)
    return found


@dataclass
class Carried:
    """What became of the prompts that went over one link."""

    answers: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    transfers: dict[int, KvTransfer] = field(default_factory=dict)
    """As the decode worker sees them: those that it took over."""
    took_s: float = 0.0

    def reports(self) -> dict[int, Report]:
        assert all(end.report is not None for end in self.ends.values())
        return {number: end.report for number, end in self.ends.items() if end.report is not None}

    def __str__(self) -> str:
        sent = self.reports().values()
        return (
            f"{len(self.answers)} prompts, {sum(len(prompts()[n]) for n in self.answers)} tokens, "
            f"{sum(report.transfer_bytes for report in sent) / 1e6:.0f} MB, "
            f"{sum(report.cached_tokens for report in sent)} tokens computed before, "
            f"{sum(report.attempt > 1 for report in sent)} second attempts, {self.took_s:.0f} s"
        )


@dataclass
class Carrying:
    """Sends crowds of prompts through one stack."""

    client: BusClient
    bus: Bus
    decode_worker: Incarnation

    async def carry(self, crowd: Sequence[int], way: Way, into: Carried) -> None:
        began_s = time.monotonic()
        ids = {number: await self._send(number, way) for number in crowd}
        for number, request_id in ids.items():
            into.ends[number] = await self.client.ended(request_id, timeout_s=PATIENCE_S)
            into.answers[number] = self.client.delivered[request_id]
        into.took_s += time.monotonic() - began_s
        into.transfers |= await self._taken_over(ids)

    async def _send(self, number: int, way: Way) -> RequestId:
        wanted = {"mode": Mode.REMOTE} | {name: v for name, v in way._asdict().items() if v}
        request = a_request(
            new_request_id(Random()),
            model=MODEL,
            prompt_ids=prompts()[number],
            stopping=Stopping(max_tokens=ANSWER_TOKENS),
            deadlines=UNHURRIED,
            forced=msgspec.convert(wanted, Forced),
        )
        await self.client.send(request)
        return request.request_id

    async def _taken_over(self, ids: Mapping[int, RequestId]) -> dict[int, KvTransfer]:
        subject = subjects.control(self.decode_worker)
        ask = KvAsk(ended=2 * len(ids))
        snapshot: KvSnapshot = await self.bus.request(subject, ask, KvSnapshot, timeout_s=60.0)
        good = [one for one in snapshot.transfers if one.state in (State.VERIFIED, State.RELEASED)]
        whose = {request_id: number for number, request_id in ids.items()}
        found = {whose.get(RequestId(one.transfer_id.rpartition(".")[0])): one for one in good}
        return {number: one for number, one in found.items() if number is not None}


async def carried_by(stack: LiveStack, fleet: Fleet) -> dict[Way, Carried]:
    """Every crowd every way of `fleet`."""
    found = {way: Carried() for way in fleet.ways}
    bus = await stack.join()
    client = BusClient(bus, new_incarnation("gateway", Random()))
    await client.start()
    carrying = Carrying(client, bus, Incarnation(stack.of("decode-worker").incarnation))
    try:
        for turn, crowd in enumerate(crowds(fleet.numbers)):
            first = turn % len(fleet.ways)
            for way in fleet.ways[first:] + fleet.ways[:first]:
                await carrying.carry(crowd, way, found[way])
    finally:
        await client.close()
        await bus.close()
    return found


@pytest.fixture(scope="module")
def bare() -> Iterator[BareEngine]:
    """One that keeps nothing of a prompt for the next."""
    engine = bare_engine(prefix_cache=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(bare: BareEngine) -> Iterator[Expected]:
    """What one engine in one process says to each prompt alone."""
    thread = ThreadPoolExecutor(1)
    order = [number for crowd in crowds(range(N_PROMPTS)) for number in crowd]
    asked = {n: thread.submit(bare.answer, prompts()[n], ANSWER_TOKENS) for n in order}
    yield [asked[number] for number in range(N_PROMPTS)]
    thread.shutdown(cancel_futures=True)


Runs = Callable[[str], Mapping[Way, Carried]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, expected: Expected) -> Runs:
    """What the fleet of a name made, once, of its prompts while the bare engine had them too."""

    @cache
    def run(name: str) -> Mapping[Way, Carried]:
        fleet, folder = FLEETS[name], tmp_path_factory.mktemp(name)
        settings = dict(fleet.workers)
        if "KV_PARKING_DISK_BYTES" in settings:
            settings["KV_PARKING_DIR"] = str(tmp_path_factory.mktemp("parked"))
        stack = LiveStack(folder)
        try:
            stack.start_all(workers=settings)
            return asyncio.run(carried_by(stack, fleet))
        finally:
            stack.close()

    return run


def test_prompts_are_of_every_length() -> None:
    lengths = [len(prompt) for prompt in prompts()]
    assert (lengths[0], lengths[-1]) == (1, LONGEST)
    assert lengths == sorted(lengths)
    crowded = [number for crowd in crowds(range(N_PROMPTS)) for number in crowd]
    assert sorted(crowded) == list(range(N_PROMPTS))


@pytest.mark.parametrize(("fleet", "way"), WAYS)
def test_every_answer_is_the_bare_engines(
    fleet: str, way: Way, runs: Runs, expected: Expected, capsys: pytest.CaptureFixture[str]
) -> None:
    carried = runs(fleet)[way]
    with capsys.disabled():
        sys.stdout.write(f"\n{fleet} {way}: {carried}\n")
    assert list(FLEETS[fleet].numbers) == sorted(carried.answers)
    assert {end.reason for end in carried.ends.values()} <= {EndReason.STOP, EndReason.LENGTH}
    others = {
        number: (len(prompts()[number]), answer, expected[number].result())
        for number, answer in carried.answers.items()
        if answer != expected[number].result()
    }
    assert not others, f"of {len(carried.answers)}: {others}"


@pytest.mark.parametrize(("fleet", "way"), WAYS)
def test_all_kv_went_that_way_and_was_verified(
    fleet: str, way: Way, runs: Runs, bare: BareEngine
) -> None:
    carried, layout = runs(fleet)[way], bare.layout
    assert list(FLEETS[fleet].numbers) == sorted(carried.transfers)
    for number, report in carried.reports().items():
        transfer, tokens = carried.transfers[number], len(prompts()[number])
        assert (report.mode, report.link) == (Mode.REMOTE, way.link)
        assert not way.path or getattr(report, "path", None) == way.path
        assert (transfer.link, transfer.codec) == (way.link, "raw")
        assert (transfer.tls, transfer.sealed) == (way.link == TCP, FLEETS[fleet].sealed)
        assert transfer.n_bytes == report.transfer_bytes
        assert transfer.n_bytes * layout.block_tokens >= layout.slot_bytes * tokens
        assert transfer.n_bytes <= layout.slot_bytes * layout.blocks(tokens)
