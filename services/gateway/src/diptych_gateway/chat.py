"""`POST /v1/chat/completions`: from bytes to a stored request, and its answer back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from starlette.types import Receive, Scope, Send

from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import RequestId
from diptych_contracts.requests import Deadlines
from diptych_gateway import metrics, spans
from diptych_gateway.accepting import Acceptance, Identity
from diptych_gateway.admitting import admitted
from diptych_gateway.answers import Heading
from diptych_gateway.bodies import decode
from diptych_gateway.checking import ChatCall, check
from diptych_gateway.delivering import deliver_events, deliver_whole, send_error
from diptych_gateway.errors import from_error
from diptych_gateway.in_flight import InFlight
from diptych_gateway.patience import Limits, Patience
from diptych_gateway.reading import ClientGone, read_json_body
from diptych_gateway.settings import GatewaySettings
from diptych_gateway.streams import AnswerStream
from diptych_policy.admission import Admission
from diptych_telemetry import logger, names, tracer
from diptych_text.answer import AnswerText

log = logger(__name__)
_tracer = tracer(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletions:
    """An ASGI application of one route.

    It writes raw ASGI messages: a response object would cost a generator step per token.
    """

    settings: GatewaySettings
    identity: Identity
    now_s: Callable[[], float]
    admission: Admission
    acceptance: Acceptance
    in_flight: InFlight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = self.now_s()
        try:
            with admitted(self.admission, self.now_s):
                await self._answer(scope, receive, send, arrived_s=arrived_s)
        except ClientGone:
            log.info("client_left_early", request_id=scope["state"]["request_id"])
        except DiptychError as err:
            await send_error(send, from_error(err))

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, *, arrived_s: float
    ) -> None:
        body = await read_json_body(
            scope["headers"],
            receive,
            max_bytes=self.settings.max_body_bytes,
            timeout_s=self.settings.body_s,
        )
        parent = propagate.extract(
            {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        )
        with ExitStack() as held:
            with _tracer.start_as_current_span(
                names.GATEWAY_ACCEPT, context=parent, kind=SpanKind.SERVER
            ) as span:
                call = check(decode(body))
                stream = await self._stream(call, scope, arrived_s=arrived_s)
                spans.describe_request(span, stream.request, call)
                held.enter_context(self.in_flight.holding(stream))
                await self.acceptance.store(stream.request, timeout_s=self.settings.accept_s)
            accepted = trace.set_span_in_context(span)
            await self._deliver(stream, call, receive, send=send, context=accepted)

    async def _stream(self, call: ChatCall, scope: Scope, *, arrived_s: float) -> AnswerStream:
        request_id: RequestId = scope["state"]["request_id"]
        request, served = await self.acceptance.request(call, request_id, identity=self.identity)
        model_metrics = metrics.of_model(request.model)
        model_metrics.prompt_tokens.inc(len(request.prompt_ids))
        return AnswerStream(
            request,
            heading=Heading(request_id, request.created_unix_ms // 1000, served.card),
            text=AnswerText(served.codec, request.stopping.stop),
            patience=Patience(self._limits()),
            arrived_s=arrived_s,
            metrics=model_metrics,
            abort=scope["state"].get("abort"),
        )

    async def _deliver(
        self,
        stream: AnswerStream,
        call: ChatCall,
        receive: Receive,
        *,
        send: Send,
        context: Context,
    ) -> None:
        with _tracer.start_as_current_span(names.GATEWAY_STREAM, context=context) as span:
            try:
                async with _watched(stream, receive):
                    if call.stream:
                        await deliver_events(stream, send, include_usage=call.include_usage)
                    else:
                        await deliver_whole(stream, send)
            finally:
                spans.describe_answer(span, stream)
                self._account(stream)

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
            prompt_tokens=len(stream.request.prompt_ids),
            answer_tokens=stream.tokens,
            total_ms=round((now_s - stream.arrived_s) * 1000, 1),
        )

    def _limits(self) -> Limits:
        settings = self.settings
        return Limits(
            silence_s=settings.first_token_s + settings.silence_grace_s,
            total_s=settings.total_s + settings.silence_grace_s,
            keep_alive_s=settings.keep_alive_s,
            slow_reader_s=settings.slow_reader_s,
        )


def deadlines(settings: GatewaySettings) -> Deadlines:
    """What the scheduler judges."""
    return Deadlines(
        first_token_s=settings.first_token_s,
        inter_token_s=settings.inter_token_s,
        total_s=settings.total_s,
    )


@asynccontextmanager
async def _watched(stream: AnswerStream, receive: Receive) -> AsyncIterator[None]:
    """Tell `stream` when its client leaves."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
