"""`POST /v1/chat/completions`: from bytes to a stored request, and its answer back."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from starlette.types import Receive, Scope, Send

from diptych_contracts.errors import DiptychError
from diptych_contracts.requests import Request
from diptych_gateway.admission.admitting import admitted
from diptych_gateway.admission.generating import Accepted, Arrival, Generations, arrival, watched
from diptych_gateway.admission.models import ServedModel
from diptych_gateway.admission.siblings import siblings
from diptych_gateway.answering.answer_parts import chunk_writer, whole_choice
from diptych_gateway.answering.answers import ChunkWriter, Heading, completion, total_usage, usage
from diptych_gateway.answering.choices import Choices, ChoicesDelivery, deliver_whole_choices
from diptych_gateway.answering.delivering import (
    EventStream,
    deliver,
    deliver_whole,
    send_error,
    send_json,
)
from diptych_gateway.completions.chat_resuming import ChatResumption, wanted_by_event_id
from diptych_gateway.errors import from_error
from diptych_gateway.idempotency.header import Once, once_of
from diptych_gateway.idempotency.joining import Joining
from diptych_gateway.judging.bodies import decode
from diptych_gateway.judging.checking import ChatCall, check
from diptych_gateway.judging.class_checks import likely_class
from diptych_gateway.listening.intake import Intake
from diptych_gateway.listening.reading import ClientGone, wants_resume
from diptych_policy.admission import Admission
from diptych_telemetry import logger
from diptych_text.codec import TextCodec

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletions:
    """An ASGI application of one route.

    It writes raw ASGI messages: a response object would cost a generator step per token.
    """

    admission: Admission
    generations: Generations
    intake: Intake
    resumption: ChatResumption
    joining: Joining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        now_s = self.generations.now_s
        arrived_s = now_s()
        try:
            body = await self.intake.read(scope["headers"], receive)
            again = wanted_by_event_id(scope, include_usage=b'"include_usage"' in body)
            if again is not None:
                await self.resumption.answer(again, scope, receive, send)
                return
            with admitted(self.admission, now_s, likely_class(body)):
                call, once = await self.intake.judged(len(body), partial(_judge, body, scope))
                del body
                came = arrival(scope, arrived_s=arrived_s)
                if call.choices > 1:
                    await self._several(call, once, came, receive, send)
                    return
                answer = self.joining.accepted(call, came, answer_id, once=once)
                async with answer as accepted:
                    # While the answer lasts nobody needs them.
                    call = replace(call, messages=[], tooling=None)
                    async with watched(accepted.stream, receive):
                        await _deliver(accepted, call, send)
        except ClientGone:
            log.info("client_left_early", request_id=scope["state"]["request_id"])
        except DiptychError as err:
            await send_error(send, from_error(err))

    async def _several(
        self, call: ChatCall, once: Once | None, came: Arrival, receive: Receive, send: Send
    ) -> None:
        """Answer with several choices; each takes a place."""
        with ExitStack() as places:
            for _ in range(call.choices - 1):
                place = admitted(self.admission, self.generations.now_s, call.priority_class)
                places.enter_context(place)
            calls = await siblings(call, self.generations.acceptance)
            call = replace(call, messages=[])
            answers = self.joining.all_accepted(calls, came, answer_id, once=once)
            async with answers as accepted:
                choices = Choices([one.stream for one in accepted])
                async with watched(choices, receive):
                    await _deliver_choices(accepted, choices, call, send)


def _judge(body: bytes, scope: Scope) -> tuple[ChatCall, Once | None]:
    call = check(decode(body), resume=wants_resume(scope["headers"]))
    return call, once_of(scope, body)


async def _deliver(accepted: Accepted, call: ChatCall, send: Send) -> None:
    stream = accepted.stream
    if call.stream:
        await deliver(stream, writer_for(accepted, call), EventStream(send))
    elif (pieces := await deliver_whole(stream)) is not None:
        made, codec = accepted.request.answer_format, speller(accepted)
        whole = whole_choice(stream, pieces, made, codec=codec)
        await send_json(send, 200, completion(_heading(accepted), [whole], usage(stream)))


async def _deliver_choices(
    accepted: list[Accepted], choices: Choices, call: ChatCall, send: Send
) -> None:
    heading, codec = _heading(accepted[0]), speller(accepted[0])
    made = accepted[0].request.answer_format
    if call.stream:
        told = {"include_usage": call.include_usage, "codec": codec}
        writers = [
            chunk_writer(heading, made, choice=number, **told) for number in range(len(accepted))
        ]
        await ChoicesDelivery(choices, writers).run(EventStream(send), total_usage)
    elif (pieces := await deliver_whole_choices(choices)) is not None:
        wholes = [
            whole_choice(stream, found, made, codec=codec, index=number)
            for number, (stream, found) in enumerate(zip(choices.streams, pieces, strict=True))
        ]
        await send_json(send, 200, completion(heading, wholes, total_usage(choices.streams)))


def speller(accepted: Accepted) -> TextCodec | None:
    """What spells an answer's logprobs, if they were asked for."""
    asked = accepted.request.sampling.top_logprobs is not None
    return accepted.served.codec if asked else None


def writer_for(accepted: Accepted, call: ChatCall) -> ChunkWriter:
    """What makes the events of a streamed answer."""
    made, codec = accepted.request.answer_format, speller(accepted)
    heading = _heading(accepted)
    return chunk_writer(heading, made, include_usage=call.include_usage, codec=codec)


def _heading(accepted: Accepted) -> Heading:
    request = accepted.request
    return Heading(request.request_id, request.created_unix_ms // 1000, accepted.served.card)


async def answer_id(request: Request, served: ServedModel) -> str:
    return Heading(request.request_id, 0, served.card).answer_id
