"""What every generating route goes through: a stored request, its answer, the books."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from starlette.types import Receive, Scope

from diptych_contracts.errors import StoreFull, Transient
from diptych_contracts.ids import RequestId, sibling
from diptych_contracts.requests import PriorityClass, Request
from diptych_gateway import metrics
from diptych_gateway.admission.accepting import Acceptance, Identity
from diptych_gateway.admission.admitting import Door
from diptych_gateway.admission.models import ServedModel
from diptych_gateway.answering import spans
from diptych_gateway.answering.patience import Limits, Patience
from diptych_gateway.answering.streams import AnswerStream, Asked
from diptych_gateway.judging.checking import Call
from diptych_gateway.keeping.in_flight import InFlight
from diptych_gateway.keeping.keeper import Keeper
from diptych_gateway.settings import GatewaySettings
from diptych_gateway.tenancy.allowances import Allowances, Taking
from diptych_gateway.tenancy.callers import ANONYMOUS, Caller
from diptych_gateway.tenancy.keyring import Renew
from diptych_telemetry import logger, names, tracer
from diptych_text.codec import TextCodec
from diptych_text.marked_answer import answer_text

log = logger(__name__)
_tracer = tracer(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client's request as it came in."""

    request_id: RequestId
    arrived_s: float
    context: Context | None = None
    """The client's trace."""
    abort: Callable[[], None] | None = None
    """Cuts its connection."""
    caller: Caller = ANONYMOUS
    """Whose it is."""


def arrival(scope: Scope, *, arrived_s: float) -> Arrival:
    """An HTTP request's arrival."""
    headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
    state = scope["state"]
    context = propagate.extract(headers)
    return Arrival(state["request_id"], arrived_s, context, state.get("abort"), state["caller"])


@dataclass(frozen=True, slots=True)
class Accepted:
    """A stored request and its answer."""

    request: Request
    served: ServedModel
    stream: AnswerStream
    ended_unix_s: int | None = None
    """When it ended, where that was long ago: its answer is a kept one."""


Prepare = Callable[[Request, ServedModel], Awaitable[str]]
"""Called before a request is stored; gives what clients call the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generations:
    """Requests on their way in, answers on their way out."""

    settings: GatewaySettings
    identity: Identity
    now_s: Callable[[], float]
    acceptance: Acceptance
    in_flight: InFlight
    keeper: Keeper
    door: Door
    allowances: Allowances
    renewed: Renew
    """The caller as it stands now."""

    @asynccontextmanager
    async def accepted(
        self, call: Call, arrival: Arrival, prepare: Prepare
    ) -> AsyncIterator[Accepted]:
        """A request, stored, whose answer is heard inside the `async with`.

        Left without an end, the request is cancelled, or kept for its client's return.
        """
        if (call.resume or call.background) and len(self.keeper) >= self.settings.max_kept:
            raise self.door.kept_full(self.settings.max_kept, call.priority_class)
        self.door.check(call.priority_class)
        caller = self.renewed(arrival.caller)
        self.allowances.check(caller)
        with ExitStack() as held:
            with _tracer.start_as_current_span(
                names.GATEWAY_ACCEPT, context=arrival.context, kind=SpanKind.SERVER
            ) as span:
                request, served, prompt = await self.acceptance.request(
                    call, arrival.request_id, identity=self.identity, tenant=arrival.caller.tenant
                )
                metrics.of_model(request.model).prompt_tokens.inc(request.prompt_tokens)
                spans.describe_request(span, request, call)
                if self.settings.record_prompts:
                    spans.describe_prompt(span, call)
                stream = self.stream(
                    request,
                    served.codec,
                    arrival,
                    stop=request.stopping.stop,
                    logprobs=request.sampling.top_logprobs is not None,
                )
                taking = await self.allowances.take(caller, _most_tokens(request))
                if taking is not None:
                    held.callback(self._settle, taking, stream)
                try:
                    answer_id = await prepare(request, served)
                except StoreFull as err:
                    raise self.door.not_stored(err, request.priority_class) from err
                held.enter_context(self.in_flight.holding(stream))
                await self._store(request, served, stream, prompt)
                del call, prompt  # megabytes, perhaps
                held.enter_context(self.keeper.reading(request.request_id))
                stream.stored = True
            context = trace.set_span_in_context(span)
            with _tracer.start_as_current_span(names.GATEWAY_STREAM, context=context) as span:
                try:
                    yield Accepted(request, served, stream)
                finally:
                    spans.describe_answer(span, stream, answer_id)
                    self._account(stream)

    @asynccontextmanager
    async def all_accepted(
        self, calls: Sequence[Call], arrival: Arrival, prepare: Prepare
    ) -> AsyncIterator[list[Accepted]]:
        """The requests of several calls of one client, all stored or none.

        The first has the arrival's id, the others' follow from it. Raises what `accepted` raises.
        """
        self.allowances.check(self.renewed(arrival.caller), len(calls))
        async with AsyncExitStack() as held:
            found: list[Accepted] = []
            for number, call in enumerate(calls):
                request_id = sibling(arrival.request_id, number)
                came = replace(arrival, request_id=request_id)
                found.append(await held.enter_async_context(self.accepted(call, came, prepare)))
            yield found

    def stream(
        self,
        request: Asked,
        codec: TextCodec,
        arrival: Arrival,
        *,
        stop: tuple[str, ...] = (),
        logprobs: bool = False,
    ) -> AnswerStream:
        """The way out of an answer to `request`, told with its logprobs or without."""
        stream = AnswerStream(
            request,
            text=answer_text(codec, stop, request.answer_format),
            patience=Patience(self._limits(request.priority_class)),
            arrived_s=arrival.arrived_s,
            metrics=metrics.of_model(request.model),
            abort=arrival.abort,
        )
        if logprobs:
            stream.tell_logprobs()
        return stream

    async def _store(
        self, request: Request, served: ServedModel, stream: AnswerStream, prompt: bytes
    ) -> None:
        self.keeper.keep(request, served.codec)
        accept_s = self.settings.deadlines().accept_s[request.priority_class]
        try:
            await self.acceptance.store(request, prompt, timeout_s=accept_s)
        except BaseException as err:
            self.keeper.drop(request.request_id)  # nobody was promised anything: cancel it now
            stream.refused = isinstance(err, StoreFull)
            if isinstance(err, Transient):
                raise self.door.not_stored(err, request.priority_class) from err
            raise
        self.door.stored(request.priority_class)

    def _settle(self, taking: Taking, stream: AnswerStream) -> None:
        """The client's connection is through with a request of limited rate."""
        request_id = stream.request.request_id
        if not stream.stored:
            taking.undo()
        elif request_id in self.keeper and stream.end is None:
            self.keeper.settle_later(request_id, taking)
        else:
            taking.settle(stream.request.prompt_tokens + stream.tokens)

    def _account(self, stream: AnswerStream) -> None:
        now_s = self.now_s()
        reason = spans.end_reason(stream)
        measured = metrics.of_model(stream.request.model)
        measured.duration.observe(now_s - stream.arrived_s)
        measured.answer_tokens.inc(stream.tokens)
        measured.ended(reason)
        log.info(
            "request_ended",
            request_id=stream.request.request_id,
            model=stream.request.model,
            reason=reason,
            attempt=stream.attempt,
            prompt_tokens=stream.request.prompt_tokens,
            answer_tokens=stream.tokens,
            total_ms=round((now_s - stream.arrived_s) * 1000, 1),
        )

    def _limits(self, priority_class: PriorityClass) -> Limits:
        settings = self.settings
        deadlines = self.identity.deadlines[priority_class]
        return Limits(
            silence_s=deadlines.first_token_s + settings.silence_grace_s,
            total_s=deadlines.total_s + settings.silence_grace_s,
            keep_alive_s=settings.keep_alive_s,
            slow_reader_s=settings.slow_reader_s,
        )


def _most_tokens(request: Request) -> int:
    """How many tokens a request may come to."""
    return request.prompt_tokens + request.stopping.max_tokens


class Reading(Protocol):
    """What a client reads: an answer, or several."""

    def leave(self) -> None:
        """The client is gone."""
        ...

    def keep_alive(self) -> None:
        """Send a sign of life."""
        ...


@asynccontextmanager
async def watched(stream: Reading, receive: Receive) -> AsyncIterator[None]:
    """Tell `stream` when its HTTP client leaves.

    One that sends no more may be there or not: news of it that is no disconnect asks for a sign of
    life, which fails if it is not.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            stream.keep_alive()
        stream.leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
