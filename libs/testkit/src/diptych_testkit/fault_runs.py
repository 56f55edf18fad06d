"""A fault plan carried out in virtual time, and every invariant looked at.

1. Every accepted request ends exactly once, and client, record and event agree how.
2. Nothing is held at the end: no seat, transfer slot, ledger entry, stored request, parked block,
   pin, nor a KV cell but those that a prefix cache keeps.
3. No limit is exceeded at any time.
4. Tokens come without a gap, a repeat or a change: they are those of an undisturbed engine.
"""

import asyncio
import sys
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import assert_never

from diptych_bus.memory import Faults, MemoryBroker
from diptych_contracts.fleet import Role
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import EVENTS, TOKENS
from diptych_testkit.builders import MODEL, a_request
from diptych_testkit.fault_plans import (
    GATEWAYS,
    MEMBERS,
    PREFILLS,
    SCHEDULERS,
    Ask,
    Away,
    Cut,
    Forget,
    Freeze,
    Kill,
    Plan,
    Read,
    Storm,
    Strike,
    plan,
)
from diptych_testkit.invariants import Invariants, spelling, spoken
from diptych_testkit.reader import Reader
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_testkit.virtual_gateway import VirtualGateway
from diptych_testkit.virtual_links import LinkWeather
from diptych_testkit.virtual_time import run_virtually

VOCAB_SIZE = 1000
STEP_S = 0.008
MODELS_S = 1.0
"""So that gateways know the models before they are asked."""
PATIENCE_S = 180.0
"""Longer than any recovery takes: a request that has not ended by then never will."""
_NOISY = (
    "job.",
    "kv.",
    "cancel.",
    "token.",
    "request.",
    "live.",
    "load.",
    "blocks.",
    "$KV.",
    "$JS.",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run."""

    journal: tuple[tuple[str, bytes], ...]
    """Every message stored in `TOKENS` and `EVENTS`, with its subject."""
    took_s: float
    """Virtual time."""

    @property
    def fingerprint(self) -> str:
        """The same for the same journal."""
        digest = blake2b(digest_size=12)
        for subject, data in self.journal:
            digest.update(subject.encode() + data)
        return digest.hexdigest()


def run_case(case: str, seed: int) -> Outcome:
    """Run one seed of one case. Raises `AssertionError` where an invariant is broken."""
    return run_virtually(_run(plan(case, seed)))


async def _run(what: Plan) -> Outcome:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    broker = MemoryBroker(faults=_noise(what))
    async with small_fleet(broker) as fleet:
        fleet.skew_ms.update(what.skew_ms)
        await FaultRun(fleet, what).run()
    journal = [m for stream in (TOKENS, EVENTS) for m in broker.streams[stream.name].after(0)]
    return Outcome(tuple((m.subject, m.data) for m in journal), loop.time() - began_s)


def _noise(what: Plan) -> Faults:
    noise = what.noise
    return Faults(
        Random(what.seed),
        drop_frac=noise.drop_frac,
        duplicate_frac=noise.duplicate_frac,
        delay_frac=noise.delay_frac,
        delay_s=noise.delay_s,
        lost_ack_frac=noise.lost_ack_frac,
        affects=lambda subject: subject.startswith(_NOISY),
    )


class FaultRun:
    """One plan and the fleet it befalls."""

    def __init__(self, fleet: SmallFleet, what: Plan) -> None:
        self._fleet = fleet
        self._plan = what
        self._gateways: dict[str, VirtualGateway] = {}
        self._readers: dict[str, Reader] = {}

    async def run(self) -> None:
        """Load and faults, and then every invariant."""
        what = self._plan
        for name in (*MEMBERS, *(GATEWAYS if what.reads else ())):
            self._start(name)
        await self._fleet.ready()
        if what.reads:
            await asyncio.sleep(MODELS_S)
        invariants = Invariants(self._fleet, what.asks)
        async with invariants.watched():
            async with asyncio.TaskGroup() as tasks:
                for ask in what.asks:
                    tasks.create_task(self._ask(ask))
                for read in what.reads:
                    tasks.create_task(self._read(read))
                for strike in what.strikes:
                    tasks.create_task(self._strike(strike))
            await invariants.hold(PATIENCE_S)

    def _start(self, name: str, *, after: str | None = None) -> None:
        """Start member `name`, in the place of `after`."""
        kind = after or name
        if kind in SCHEDULERS:
            self._fleet.scheduler(name, tick_s=0.1)
            return
        if kind in GATEWAYS:
            self._gateways[name] = VirtualGateway(self._fleet, name)
            return
        build = self._plan.prefill if kind in PREFILLS else self._plan.decode
        engine = ToyStepEngine(
            vocab_size=spelling().vocab_size if self._plan.reads else VOCAB_SIZE,
            max_sequences=build.max_sequences,
            kv_tokens=build.kv_tokens,
            context_tokens=512,
            step_s=STEP_S,
            block_tokens=build.block_tokens,
            prefix_sequences=build.prefix_sequences,
            prefix_tokens=build.prefix_tokens,
            draft_tokens=build.draft_tokens,
        )
        role = Role.PREFILL if kind in PREFILLS else Role.DECODE
        self._fleet.worker(
            name,
            role,
            engine=engine,
            transfer_slots=build.transfer_slots,
            kv_reuse=build.kv_reuse,
            kv_parking_host_bytes=build.parking_bytes,
        )

    # Load

    async def _ask(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s)
        client = self._fleet.client
        request = a_request(
            ask.name,
            prompt_ids=ask.prompt_ids,
            sampling=ask.sampling,
            stopping=Stopping(max_tokens=ask.max_tokens),
            forced=ask.forced,
            tenant=ask.tenant,
        )
        await client.send(request)
        if ask.cancel_after_s is not None:
            await asyncio.sleep(ask.cancel_after_s)
            client.cancel(request)

    async def _read(self, read: Read) -> None:
        await asyncio.sleep(read.at_s)
        body = {
            "model": MODEL,
            "input": read.text,
            "max_output_tokens": read.max_tokens,
            "temperature": 0,
        }
        reader = Reader(self._living_gateways, body)
        try:
            async with asyncio.timeout(read.leave_after_s or PATIENCE_S):
                await reader.read()
        except TimeoutError:
            assert read.leave_after_s is not None, f"{read.name}: no end in {PATIENCE_S:g} s"
        expected = spoken(read.text, read.max_tokens)
        if reader.end is None:
            assert expected.startswith(reader.text), f"{read.name}: {reader.text!r}"
        else:
            assert reader.text == expected, f"{read.name}: {reader.text!r} is not {expected!r}"
            assert reader.end["status"] == "incomplete", f"{read.name}: {reader.end}"

    def _living_gateways(self) -> list[VirtualGateway]:
        lives = self._fleet.lives
        return [gateway for name, gateway in self._gateways.items() if name in lives]

    # Faults

    async def _strike(self, strike: Strike) -> None:
        await asyncio.sleep(strike.at_s)
        fleet = self._fleet
        match strike:
            case Kill(member=member):
                await fleet.kill(member)
                await asyncio.sleep(strike.again_after_s)
                await fleet.bus.line.reachable(PATIENCE_S)  # a supervisor tries until it comes up
                self._start(f"{member}b", after=member)
            case Freeze(member=member):
                fleet.freeze(member)
                await asyncio.sleep(strike.for_s)
                fleet.thaw(member)
            case Cut(member=member):
                line = fleet.lives[member].bus.line
                line.cut()
                await asyncio.sleep(strike.for_s)
                line.heal()
            case Away():
                fleet.broker.go_away()
                await asyncio.sleep(strike.for_s)
                fleet.broker.come_back()
            case Storm():
                await _storm(fleet, strike)
            case Forget(tenant=tenant):
                for name, loop in fleet.loops.items():
                    if name in fleet.lives:
                        loop.forget(tenant)
            case _:
                assert_never(strike)


async def _storm(fleet: SmallFleet, storm: Storm) -> None:
    assert fleet.network is not None
    rng = Random(f"{storm}")
    fleet.network.weather = LinkWeather(storm.latency_s, storm.bytes_per_s, storm.break_frac, rng)
    await asyncio.sleep(storm.for_s)
    fleet.network.weather = LinkWeather()


def main(case: str, seed: str) -> None:
    """Replay one seed: its plan, what is logged, and how it ended."""
    what = plan(case, int(seed))
    say = sys.stdout.write
    say(f"{len(what.asks) + len(what.reads)} requests; {what.noise}\n")
    say(f"clocks ahead: {what.skew_ms or 'none'}\n")
    for strike in what.strikes:
        say(f"  {strike}\n")
    outcome = run_case(case, int(seed))
    say(f"every invariant holds; {len(outcome.journal)} messages in {outcome.took_s:.1f} s, ")
    say(f"fingerprint {outcome.fingerprint}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
