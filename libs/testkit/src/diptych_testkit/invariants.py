"""What must hold of a small fleet, whatever befell it; see `fault_runs`."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TypeVar

from diptych_bus.port import Delivery
from diptych_contracts import subjects
from diptych_contracts.events import LifeCycleEvent, RequestEnded, RequestQueued
from diptych_contracts.fleet import WorkerLoad
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RequestRecord
from diptych_contracts.sampling import Sampling
from diptych_contracts.streams import EVENTS, REQUEST_RECORDS, REQUESTS
from diptych_contracts.wire import decode
from diptych_engine.port import Engine
from diptych_engine.step_loop import StepLoop
from diptych_policy.job_admission import MAX_WAITING
from diptych_testkit.builders import MODEL
from diptych_testkit.fault_plans import PREFILLS, Ask
from diptych_testkit.small_fleet import SmallFleet
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

E = TypeVar("E", RequestEnded, RequestQueued)
SETTLE_S = 45.0
"""An answer with resume intent that nobody reads is given up after 30 s."""
_LOOK_S = 0.1


class Invariants:
    """The books of one run."""

    def __init__(self, fleet: SmallFleet, asks: Sequence[Ask]) -> None:
        self._fleet = fleet
        self._asks = {ask.name: ask for ask in asks}
        self._exceeded: list[str] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look at every limit whenever a worker reports, inside the `async with`."""
        loads = await self._fleet.bus.subscribe(subjects.LOADS, self._on_load)
        try:
            yield
        finally:
            await loads.close()

    async def hold(self, patience_s: float) -> None:
        """Wait for the end of everything. Raises `AssertionError` where something is wrong."""
        await self._ended(patience_s)
        self._tokens_are_right()
        await self._closed()
        await self._nothing_is_held()
        assert not self._exceeded, self._exceeded
        assert not self._fleet.crashes, self._fleet.crashes

    async def _ended(self, patience_s: float) -> None:
        client = self._fleet.client
        try:
            await client.until(lambda: self._asks.keys() <= client.ends.keys(), patience_s)
        except TimeoutError:
            missing = [name for name in self._asks if name not in client.ends]
            seen = {name: await self._record(name) for name in missing}
            raise AssertionError(
                f"without an end after {patience_s:g} s: {seen}, {self._stages()}"
            ) from None

    def _tokens_are_right(self) -> None:
        client = self._fleet.client
        for name, ask in self._asks.items():
            end, came = client.ends[name], client.delivered[name]
            expected = undisturbed(ask.prompt_ids, ask.max_tokens, ask.sampling)
            if end.reason is EndReason.LENGTH:
                assert came == expected, f"{name}: {came} is not {expected}"
                assert end.tokens in (None, len(came)), f"{name}: {end}"
            else:
                assert came == expected[: len(came)], f"{name}: {came} is no part of {expected}"
                cancelled = end.reason is EndReason.CANCELLED and ask.cancel_after_s is not None
                assert cancelled, f"{name} ended: {end}"

    async def _closed(self) -> None:
        """Client, record and events agree."""
        client = self._fleet.client
        for name in self._asks:
            try:
                record = await self._fleet.closed(name, timeout_s=SETTLE_S)
            except TimeoutError:
                seen = await self._record(name), self._stages()
                raise AssertionError(f"{name} is not closed: {seen}") from None
            assert record.end == client.ends[name], f"{name}: {record.end} {client.ends[name]}"
        await _until(
            lambda: self._told() == Counter(self._taken_on()),
            "one event per end",
            seen=lambda: (self._told(), self._taken_on()),
        )
        for event in self._events(RequestEnded):
            record = await self._fleet.closed(event.request_id, timeout_s=SETTLE_S)
            assert record.end == event.end, f"{record} {event}"

    async def _nothing_is_held(self) -> None:
        await _until(lambda: not self._held(), "nothing to be held", seen=self._held)
        await self._fleet.settled(timeout_s=SETTLE_S)

    def _held(self) -> list[str]:
        return list(self._holders())

    def _holders(self) -> Iterator[str]:
        fleet = self._fleet
        stored = [m.subject for m in fleet.broker.streams[REQUESTS.name].after(0)]
        if stored:
            yield f"requests are still stored: {stored}"
        for name, load in fleet.loads.items():
            if name in fleet.lives and load.running + load.waiting + load.kv_tokens_used:
                yield f"{name} holds {load}"
            if name in fleet.lives and load.transfer_slots_used:
                yield f"{name} holds {load.transfer_slots_used} transfer slots"
            if name in fleet.lives and (load.parked or any(r.used_bytes for r in load.parking)):
                yield f"{name} parks {load.parked}: {load.parking}"
        for name, engine in fleet.engines.items():
            if name in fleet.lives and isinstance(engine, ToyStepEngine):
                yield from _cells_held(name, engine, fleet.loops[name])
        for name, ledger in fleet.ledgers.items():
            if name in fleet.lives and len(ledger):
                yield f"{name} still has {ledger.stages()}"
        yield from fleet.network.leaks() if fleet.network is not None else ()

    def _told(self) -> Counter[str]:
        return Counter(event.request_id for event in self._events(RequestEnded))

    def _taken_on(self) -> set[str]:
        """Every request that a scheduler has taken on, whoever asked."""
        return {*self._asks, *(event.request_id for event in self._events(RequestQueued))}

    def _events(self, kind: type[E]) -> list[E]:
        stored = self._fleet.broker.streams[EVENTS.name].after(0)
        events = [decode(message.data, LifeCycleEvent) for message in stored]
        return [event for event in events if isinstance(event, kind)]

    async def _record(self, name: str) -> RequestRecord | None:
        kept = await self._fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).get(name)
        return kept.value if kept is not None else None

    def _stages(self) -> dict[str, object]:
        return {name: ledger.stages() for name, ledger in self._fleet.ledgers.items()}

    def _on_load(self, delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        name = self._fleet.name_of(load.worker)
        spec = self._fleet.engines[name].spec
        # A prefill needs no room before it runs, nor after: what is promised to it is not bounded.
        promised = 0 if name.startswith(PREFILLS) else load.kv_tokens_used
        limits = {
            "sequences": (load.running, spec.max_sequences),
            "jobs": (load.running + load.waiting, MAX_WAITING),
            "KV cells": (promised, spec.kv_tokens),
            "transfer slots": (load.transfer_slots_used, self._fleet.transfer_slots[name]),
        }
        for what, (seen, limit) in limits.items():
            if seen > limit:
                self._exceeded.append(f"{name}: {seen} {what}, at most {limit} allowed")


def _cells_held(name: str, engine: ToyStepEngine, loop: Engine) -> Iterator[str]:
    """Cells beside those that prefixes keep, and pins that nobody will ask for."""
    assert isinstance(loop, StepLoop)
    if engine.cells_used != loop.kept_cells:
        yield f"{name} holds {engine.cells_used} KV cells, {loop.kept_cells} are kept"
    if loop.pinned:
        yield f"{name} pins {loop.pinned} prefixes"
    loop.check()


async def _until(holds: Callable[[], bool], what: str, *, seen: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(SETTLE_S):
            while True:
                if holds():
                    return
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(f"expected {what} within {SETTLE_S:g} s, saw: {seen()}") from None


@cache
def undisturbed(prompt_ids: tuple[int, ...], n_tokens: int, sampling: Sampling) -> list[int]:
    """What an engine answers that nothing befalls."""
    return toy_answer(prompt_ids, n_tokens, sampling=sampling)


@cache
def spelling() -> TextCodec:
    """How the small fleet's model writes its tokens."""
    return TextCodec.from_card(tiny_card(model=MODEL))


@cache
def spoken(text: str, n_tokens: int) -> str:
    """What a client reads that says `text`, if nothing befalls anybody."""
    codec = spelling()
    prompt_ids = codec.encode_chat([{"role": "user", "content": text}])
    answer = AnswerText(codec)
    ids = toy_answer(prompt_ids, n_tokens, vocab_size=codec.vocab_size)
    return "".join(answer.push((token,)) for token in ids) + answer.finish()
