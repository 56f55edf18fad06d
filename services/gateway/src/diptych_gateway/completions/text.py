"""`POST /v1/completions`: a prompt as it is, text or token ids, and the answers to it."""

import asyncio
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
from diptych_gateway.answering.answers import Heading, completion, total_usage
from diptych_gateway.answering.choices import (
    Choices,
    ChoicesDelivery,
    UsageOf,
    deliver_whole_choices,
)
from diptych_gateway.answering.delivering import EventStream, send_error, send_json
from diptych_gateway.completions.chat import speller
from diptych_gateway.completions.chat_resuming import ChatResumption, Form, wanted_by_event_id
from diptych_gateway.completions.text_answers import KIND, PREFIX, TextWriter, text_choice
from diptych_gateway.completions.text_checks import (
    CompletionCall,
    check_completion,
    decode_completion,
)
from diptych_gateway.errors import from_error
from diptych_gateway.idempotency.header import Once, once_of
from diptych_gateway.idempotency.joining import Joining
from diptych_gateway.judging.checking import Call, Prompt
from diptych_gateway.judging.class_checks import likely_class
from diptych_gateway.listening.intake import SMALL_BYTES, Intake
from diptych_gateway.listening.reading import ClientGone, wants_resume
from diptych_policy.admission import Admission
from diptych_telemetry import logger
from diptych_text.detokenizing import Detokenizer

_TOKEN_BYTES = 16
"""What a token of an echoed prompt costs, in bytes of a body that is judged."""

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """An ASGI application of one route."""

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
                await self.resumption.answer(
                    again, scope, receive, send, form=Form(PREFIX, TextWriter)
                )
                return
            with admitted(self.admission, now_s, likely_class(body)):
                call, once = await self.intake.judged(len(body), partial(_judge, body, scope))
                del body
                came = arrival(scope, arrived_s=arrived_s)
                await self._answer(call, once, came, receive, send)
        except ClientGone:
            log.info("client_left_early", request_id=scope["state"]["request_id"])
        except DiptychError as err:
            await send_error(send, from_error(err))

    async def _answer(
        self, call: CompletionCall, once: Once | None, came: Arrival, receive: Receive, send: Send
    ) -> None:
        """Answer every prompt; each answer takes a place."""
        with ExitStack() as places:
            for _ in range(len(call.prompts) * call.choices - 1):
                place = admitted(self.admission, self.generations.now_s, call.priority_class)
                places.enter_context(place)
            calls: list[Call] = []
            echoes: list[str] = []
            for prompt in call.prompts:
                answers = await siblings(replace(call, prompt=prompt), self.generations.acceptance)
                calls += answers
                echo = await self._echo(call, prompt) if call.echo else ""
                echoes += [echo] * len(answers)
                await asyncio.sleep(0)  # 32 short texts take a while too
            prompts, call = len(call.prompts), replace(call, prompt=None, prompts=())
            every = self.joining.all_accepted(calls, came, _answer_id, once=once)
            async with every as accepted:
                del calls, answers  # megabytes, perhaps
                choices = Choices([one.stream for one in accepted])
                used = partial(total_usage, prompts=prompts)
                async with watched(choices, receive):
                    await _deliver(_Answers(accepted, choices, echoes, used), call, send)

    async def _echo(self, call: CompletionCall, prompt: Prompt) -> str:
        if prompt.ids is None:
            return prompt.text
        served, size = (
            self.generations.acceptance.served(call.model),
            len(prompt.ids) * _TOKEN_BYTES,
        )
        codec = served.codec if size <= SMALL_BYTES else served.far_codec
        spell = partial(Detokenizer(codec).push, prompt.ids)
        return await self.intake.judged(size, spell)


@dataclass(frozen=True, slots=True)
class _Answers:
    accepted: list[Accepted]
    choices: Choices
    echoes: list[str]
    used: UsageOf


def _judge(body: bytes, scope: Scope) -> tuple[CompletionCall, Once | None]:
    call = check_completion(decode_completion(body), resume=wants_resume(scope["headers"]))
    return call, once_of(scope, body)


async def _deliver(answers: _Answers, call: CompletionCall, send: Send) -> None:
    first = answers.accepted[0]
    request, codec = first.request, speller(first)
    heading = Heading(
        request.request_id, request.created_unix_ms // 1000, first.served.card, prefix=PREFIX
    )
    if call.stream:
        several = len(answers.accepted) > 1
        writers = [
            TextWriter(
                heading,
                echo=echo,
                include_usage=call.include_usage,
                choice=number if several else None,
                codec=codec,
            )
            for number, echo in enumerate(answers.echoes)
        ]
        delivery = ChoicesDelivery(answers.choices, writers)
        await delivery.run(EventStream(send), answers.used)
    elif (pieces := await deliver_whole_choices(answers.choices)) is not None:
        streams = answers.choices.streams
        made = [
            text_choice(streams[n], found, codec=codec, index=n, echo=answers.echoes[n])
            for n, found in enumerate(pieces)
        ]
        await send_json(send, 200, completion(heading, made, answers.used(streams), kind=KIND))


async def _answer_id(request: Request, served: ServedModel) -> str:
    return f"{PREFIX}{request.request_id}"
