"""Requests with an idempotency key: run once, and joined by whoever asks the same again.

`policy.claims` decides; here its steps are taken. Whoever joins sends the whole body again, so the
request is made of it anew and its answer delivered like any other: only the tokens come from
elsewhere, out of the journal that carries them or from the claim that keeps them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import msgspec

from diptych_bus.port import Bus, Kept
from diptych_contracts.idempotency import Claim, ClaimState
from diptych_contracts.ids import Incarnation, RequestId, sibling
from diptych_contracts.journal import Fence
from diptych_contracts.requests import Request, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_gateway.admission.generating import Accepted, Arrival, Generations, Prepare
from diptych_gateway.idempotency.claims import Claims, Held
from diptych_gateway.idempotency.header import Once, in_use
from diptych_gateway.judging.checking import Call
from diptych_gateway.keeping.records import Records
from diptych_gateway.keeping.resuming import Resumption
from diptych_policy.claims import Step, next_step
from diptych_telemetry import logger

_LOOK_S = 0.05
_GIVE_UP_S = 3.0
"""Beyond its accept deadline and the time its body takes, a gateway stores a request no more."""
_BYTES_PER_S = 256 * 1024
"""Bodies are judged and tokenized faster than this."""
_WITHDRAWN = "its gateway died before it was stored"

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the tokens of a request stand."""

    request: Request
    journal_seq: int

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def gateway(self) -> Incarnation:
        return self.request.gateway

    @property
    def answer_id(self) -> str:
        return self.request.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The way in of every generating route."""

    bus: Bus
    generations: Generations
    resumption: Resumption
    records: Records
    claims: Claims

    def accepted(
        self, call: Call, arrival: Arrival, prepare: Prepare, *, once: Once | None
    ) -> AbstractAsyncContextManager[Accepted]:
        """`Generations.accepted`; with `once`, of a request that runs at most once.

        Raises:
            ApiError: the key stands for another body (409), or its answer is gone (410).
        """
        if once is None:
            return self.generations.accepted(call, arrival, prepare)
        return self._once(once.terms(call), arrival, prepare, once=once)

    @asynccontextmanager
    async def all_accepted(
        self, calls: Sequence[Call], arrival: Arrival, prepare: Prepare, *, once: Once | None
    ) -> AsyncIterator[list[Accepted]]:
        """`Generations.all_accepted`; with `once`, each of them runs at most once."""
        if once is None:
            async with self.generations.all_accepted(calls, arrival, prepare) as all_:
                yield all_
            return
        async with AsyncExitStack() as held:
            found: list[Accepted] = []
            for number, call in enumerate(calls):
                came = replace(arrival, request_id=sibling(arrival.request_id, number))
                one = self.accepted(call, came, prepare, once=once.of(number))
                found.append(await held.enter_async_context(one))
            yield found

    @asynccontextmanager
    async def _once(
        self, call: Call, arrival: Arrival, prepare: Prepare, *, once: Once
    ) -> AsyncIterator[Accepted]:
        found = await self._claimed(call, arrival, once)
        if isinstance(found, Held):
            answer = self._run(call, arrival, prepare, held=found)
        elif found.state is ClaimState.ENDED:
            answer = self._replay(call, arrival, found)
        else:
            answer = self._join(call, arrival, found, once=once)
        async with answer as accepted:
            yield accepted

    async def _claimed(self, call: Call, arrival: Arrival, once: Once) -> Held | Claim:
        """The key, claimed for a new request, or what it stands for."""
        records = self.bus.bucket(REQUEST_RECORDS, RequestRecord)
        while True:
            kept = await self.claims.get(once.name)
            record = None if kept is None else await records.get(kept.value.request_id)
            step = next_step(
                None if kept is None else kept.value,
                None if record is None else record.value,
                digest=once.digest,
                now_unix_ms=self.bus.unix_ms(),
            )
            match step:
                case Step.RUN:
                    held = await self._take(call, arrival, once, kept)
                    if held is not None:
                        return held
                case Step.DIFFERENT:
                    raise in_use()
                case Step.REPLAY | Step.JOIN:
                    assert kept is not None
                    return _as_recorded(kept.value, None if record is None else record.value)
                case Step.WAIT:
                    await asyncio.sleep(_LOOK_S)
                case Step.WITHDRAW:
                    assert kept is not None
                    await self.records.withdraw(kept.value, _WITHDRAWN)

    async def _take(
        self, call: Call, arrival: Arrival, once: Once, kept: Kept[Claim] | None
    ) -> Held | None:
        identity = self.generations.identity
        accept_s = self.generations.settings.deadlines().accept_s[call.priority_class]
        total_s = identity.deadlines[call.priority_class].total_s
        now_unix_ms = self.bus.unix_ms()
        patience_s = accept_s + _GIVE_UP_S + once.n_bytes / _BYTES_PER_S
        claim = Claim(
            digest=once.digest,
            tenant=arrival.caller.tenant,
            request_id=arrival.request_id,
            gateway=identity.gateway,
            journal_seq=self.generations.in_flight.journal_seq,
            created_unix_ms=now_unix_ms,
            deadline_unix_ms=now_unix_ms + int((patience_s + total_s) * 1000),
            give_up_unix_ms=now_unix_ms + int(patience_s * 1000),
            secret=identity.secret(arrival.request_id),
        )
        return await self.claims.take(once.name, claim, 0 if kept is None else kept.revision)

    @asynccontextmanager
    async def _run(
        self, call: Call, arrival: Arrival, prepare: Prepare, *, held: Held
    ) -> AsyncIterator[Accepted]:
        request_id = held.claim.request_id
        self.claims.running(held.name, request_id)
        is_accepted = False
        try:
            async with self.generations.accepted(call, arrival, prepare) as accepted:
                is_accepted = True
                await self.claims.stored(held, accepted.request.created_unix_ms)
                try:
                    yield accepted
                finally:
                    self.claims.ended(accepted.stream.view)
        finally:
            if not is_accepted:
                self.claims.release(held.name, request_id)

    @asynccontextmanager
    async def _join(
        self, call: Call, arrival: Arrival, claim: Claim, *, once: Once
    ) -> AsyncIterator[Accepted]:
        accepted = await self._again(call, arrival, claim)
        log.info("request_joined", request_id=claim.request_id, gateway=claim.gateway)
        self.claims.running(once.name, claim.request_id)
        standing = Standing(accepted.request, claim.journal_seq)
        async with self.resumption.reading(accepted.stream, standing):
            try:
                yield accepted
            finally:
                self.claims.ended(accepted.stream.view)
                if claim.gateway != self.generations.identity.gateway:
                    self.claims.forget(claim.request_id)

    @asynccontextmanager
    async def _replay(self, call: Call, arrival: Arrival, claim: Claim) -> AsyncIterator[Accepted]:
        kept = await self.claims.answer(claim)
        accepted = await self._again(call, arrival, claim)
        stream, now_s = accepted.stream, self.generations.now_s()
        fence = Fence(request_id=claim.request_id, attempt=kept.end.attempt)
        for part in (fence, kept.entry, kept.end):
            stream.feed(part, now_s=now_s)
        with self.generations.in_flight.reading(stream):
            yield replace(accepted, ended_unix_s=kept.ended_unix_s)

    async def _again(self, call: Call, arrival: Arrival, claim: Claim) -> Accepted:
        """The request of `claim`, made anew, and a way out for its answer."""
        generations = self.generations
        request, served, _ = await generations.acceptance.request(
            call,
            claim.request_id,
            identity=generations.identity,
            tenant=arrival.caller.tenant,
        )
        request = msgspec.structs.replace(
            request,
            gateway=claim.gateway,
            created_unix_ms=claim.created_unix_ms,
            # A kept answer is said again by this gateway itself: nobody speaks.
            secret=b"" if claim.state is ClaimState.ENDED else claim.secret,
        )
        stream = generations.stream(
            request,
            served.codec,
            arrival,
            stop=request.stopping.stop,
            logprobs=request.sampling.top_logprobs is not None,
        )
        return Accepted(request, served, stream)


def _as_recorded(claim: Claim, record: RequestRecord | None) -> Claim:
    """`claim` with what the record of its request knows better."""
    if record is None or claim.state is ClaimState.ENDED:
        return claim
    head = record.head
    created = claim.created_unix_ms if head is None else head.created_unix_ms
    return msgspec.structs.replace(claim, gateway=record.gateway, created_unix_ms=created)
