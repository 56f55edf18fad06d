"""Bucket `idempotency`, as a gateway uses it: keys claimed, requests marked, answers kept.

What follows a claim (the answer is there, the key is free again) waits in order while the bus is
away. Beyond `MAX_WAITING` the oldest is dropped: whoever comes next with that key finds out by the
request's record and journal.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import time

import msgspec

from diptych_bus.port import Bus, Kept
from diptych_contracts.errors import Conflict, Permanent, Transient
from diptych_contracts.idempotency import Claim, ClaimState, KeptAnswer
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import TokenEntry
from diptych_contracts.responses import PartRef
from diptych_contracts.streams import IDEMPOTENCY, IDEMPOTENCY_TTL_S, MAX_RESPONSE_BYTES
from diptych_contracts.wire import encode
from diptych_gateway.keeping.large_parts import ResponseParts
from diptych_gateway.keeping.write_behind import MAX_WAITING, WriteBehind
from diptych_policy.journal import RequestView
from diptych_telemetry import logger

FREE_TTL_S = 60.0
_STORED_S = 1.0
"""How long an answer waits for its claim's mark; without it a joiner asks the record."""

Change = Callable[[Claim], Claim | None]

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """A key that this gateway has claimed for a request of its own."""

    name: str
    revision: int
    claim: Claim


class Claims:
    """What keys stand for."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = bus.bucket(IDEMPOTENCY, Claim)
        self._parts = ResponseParts(bus)
        self._names: dict[RequestId, str] = {}
        self._writes: WriteBehind[str, Change] = WriteBehind(self._written, self._drop)

    async def get(self, name: str) -> Kept[Claim] | None:
        """What a key stands for. Raises `Transient`."""
        return await self._bucket.get(name)

    async def take(self, name: str, claim: Claim, revision: int) -> Held | None:
        """Claim a key that stood at `revision` (0: nowhere); None if another was first.

        Raises:
            Transient: the bus is away.
        """
        try:
            if revision:
                made = await self._bucket.update(name, claim, revision, ttl_s=IDEMPOTENCY_TTL_S)
            else:
                made = await self._bucket.create(name, claim, ttl_s=IDEMPOTENCY_TTL_S)
        except Conflict:
            return None
        return Held(name, made, claim)

    async def stored(self, held: Held, created_unix_ms: int) -> None:
        """Note that JetStream has the request, as far as the bus is there."""
        changed = msgspec.structs.replace(
            held.claim, state=ClaimState.STORED, created_unix_ms=created_unix_ms
        )
        try:
            async with asyncio.timeout(_STORED_S):
                await self._bucket.update(
                    held.name, changed, held.revision, ttl_s=IDEMPOTENCY_TTL_S
                )
        except (Transient, Conflict, TimeoutError) as err:
            log.warning("claim_not_marked", request_id=held.claim.request_id, error=str(err))

    def running(self, name: str, request_id: RequestId) -> None:
        """A request of that key runs here: its end, heard by whomever, is the key's."""
        while len(self._names) >= MAX_WAITING:
            del self._names[next(iter(self._names))]
        self._names[request_id] = name

    def ended(self, view: RequestView) -> None:
        """A request has ended: keep its answer, or free its key if there is none."""
        if view.end is None or (name := self._names.pop(view.request_id, None)) is None:
            return
        if view.end.reason.is_finish:
            answer = answer_of(view)
            self._writes.put(name, lambda claim: _with(claim, view.request_id, answer))
        else:
            self._writes.put(name, lambda claim: _freed(claim, view.request_id))

    def forget(self, request_id: RequestId) -> None:
        """The request runs elsewhere, and is read here no more."""
        self._names.pop(request_id, None)

    def release(self, name: str, request_id: RequestId) -> None:
        """A request was not accepted: free its key."""
        self._names.pop(request_id, None)
        self._writes.put(name, lambda claim: _freed(claim, request_id))

    async def answer(self, claim: Claim) -> KeptAnswer:
        """The answer of a claim that has ended.

        Raises:
            ApiError: it is gone (410).
            Transient: the bus is away.
        """
        if claim.answer is not None:
            return claim.answer
        assert claim.part is not None
        found: KeptAnswer = await self._parts.get(claim.part, KeptAnswer)
        return found

    async def settled(self, timeout_s: float) -> bool:
        """Wait until everything is written; False if `timeout_s` ran out."""
        return await self._writes.settled(timeout_s)

    async def run(self) -> None:
        """Write until cancelled."""
        await self._writes.run()

    def _drop(self, name: str, change: Change) -> None:
        log.warning("claim_left_open", waiting=MAX_WAITING)

    async def _written(self, name: str, change: Change) -> None:
        try:
            await self._write(name, change)
        except Permanent as err:
            log.error("claim_not_written", error=str(err))

    async def _write(self, name: str, change: Change) -> None:
        while True:
            kept = await self._bucket.get(name)
            changed = None if kept is None else change(kept.value)
            if kept is None or changed is None:
                return
            ttl_s = FREE_TTL_S if changed.state is ClaimState.FREE else IDEMPOTENCY_TTL_S
            changed = await self._slim(name, changed)
            try:
                await self._bucket.update(name, changed, kept.revision, ttl_s=ttl_s)
            except Conflict:
                continue
            return

    async def _slim(self, name: str, claim: Claim) -> Claim:
        """`claim` with a large answer kept apart."""
        if claim.answer is None or len(encode(claim)) <= MAX_RESPONSE_BYTES:
            return claim
        ref: PartRef = await self._parts.put(f"{name}.answer", claim.answer)
        return msgspec.structs.replace(claim, answer=None, part=ref)


def answer_of(view: RequestView) -> KeptAnswer:
    """What an ended request came to."""
    assert view.end is not None
    entry = TokenEntry(
        request_id=view.request_id,
        attempt=view.end.attempt,
        index=0,
        token_ids=tuple(view.token_ids),
        logprobs=tuple(view.logprobs or ()),
    )
    return KeptAnswer(entry=entry, end=view.end, ended_unix_s=int(time()))


def _with(claim: Claim, request_id: RequestId, answer: KeptAnswer) -> Claim | None:
    if claim.request_id != request_id or claim.state is ClaimState.ENDED:
        return None
    return msgspec.structs.replace(claim, state=ClaimState.ENDED, answer=answer)


def _freed(claim: Claim, request_id: RequestId) -> Claim | None:
    if claim.request_id != request_id or claim.state in (ClaimState.ENDED, ClaimState.FREE):
        return None
    return msgspec.structs.replace(claim, state=ClaimState.FREE)
