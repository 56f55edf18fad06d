"""A chat answer taken up again, at any gateway: `GET /v1/chat/completions/{id}`.

Also `POST /v1/chat/completions` with `Last-Event-ID`, as clients of server-sent events reconnect:
then the body says no more than how to stream. The record names journal and stretch, for as long as
its window lasts; only requests with `x-diptych-resume: 1` have one that does.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from diptych_bus.port import Bus
from diptych_contracts.answer_formats import AnswerFormat
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import AnswerHead, PriorityClass, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_gateway.admission.admitting import admitted
from diptych_gateway.admission.generating import Generations, arrival, watched
from diptych_gateway.admission.models import Models
from diptych_gateway.answering.answer_parts import PartsWriter, whole_choice
from diptych_gateway.answering.answers import ChunkWriter, Heading, completion, usage
from diptych_gateway.answering.delivering import EventStream, deliver, deliver_whole, send_json
from diptych_gateway.errors import ApiError
from diptych_gateway.keeping.resuming import Resumption
from diptych_gateway.listening.reading import flag, parameters
from diptych_policy.admission import Admission

_EVENT_ID = re.compile(r"(?P<request>[0-9a-f]{32}):(?P<index>-1|\d{1,9})")
_ANSWER_ID = re.compile(r"(?:chatcmpl-)?(?P<request>[0-9a-f]{32})")
_NOTHING = -2
_LOOKS, _LOOK_S = 4, 0.25
"""A request that was accepted a moment ago has no record yet."""


@dataclass(frozen=True, slots=True)
class Form:
    """How an endpoint tells its answers."""

    prefix: str
    writer: type[ChunkWriter]


CHAT_FORM = Form("chatcmpl-", ChunkWriter)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which answer, and from where."""

    request_id: RequestId
    after: int = _NOTHING
    stream: bool = True
    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    """A chat answer, as its record describes it."""

    record: RequestRecord
    head: AnswerHead

    @property
    def request_id(self) -> RequestId:
        return self.record.request_id

    @property
    def gateway(self) -> Incarnation:
        return self.record.gateway

    @property
    def journal_seq(self) -> int:
        return self.record.journal_seq

    @property
    def deadline_unix_ms(self) -> int:
        return self.record.deadline_unix_ms

    @property
    def secret(self) -> bytes:
        return self.record.secret

    @property
    def model(self) -> str:
        return self.head.model

    @property
    def prompt_tokens(self) -> int:
        return self.head.prompt_tokens

    @property
    def priority_class(self) -> PriorityClass:
        return self.head.priority_class

    @property
    def answer_format(self) -> AnswerFormat | None:
        return self.head.answer_format

    @property
    def tenant(self) -> str:
        return self.record.tenant

    @property
    def answer_id(self) -> str:
        return f"chatcmpl-{self.request_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResumption:
    """Takes chat answers up again."""

    bus: Bus
    admission: Admission
    generations: Generations
    models: Models
    resumption: Resumption

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/chat/completions/{id}`: whole, or as a stream."""
        await self.answer(wanted_by_query(scope), scope, receive, send)

    async def answer(
        self,
        wanted: Wanted,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        form: Form = CHAT_FORM,
    ) -> None:
        """Say the answer, from where its client stopped, in the form of its endpoint.

        Raises:
            ApiError: its window has passed (410), or it was not asked to be resumable (400).
        """
        now_s = self.generations.now_s
        came = arrival(scope, arrived_s=now_s())
        resumed = await self._found(wanted.request_id, came.caller.tenant)
        head = resumed.head
        served = self.models.get(head.model)
        with admitted(self.admission, now_s, head.priority_class):
            codec = None if head.top_logprobs is None else served.codec
            made = head.answer_format if form is CHAT_FORM else None
            stream = self.generations.stream(
                resumed, served.codec, came, stop=head.stop, logprobs=codec is not None
            )
            async with self.resumption.reading(stream, resumed), watched(stream, receive):
                created_unix_s = head.created_unix_ms // 1000
                heading = Heading(
                    wanted.request_id, created_unix_s, served.card, prefix=form.prefix
                )
                if wanted.stream:
                    told: dict[str, Any] = {
                        "include_usage": wanted.include_usage,
                        "after": wanted.after,
                        "codec": codec,
                    }
                    writer = (
                        form.writer(heading, **told)
                        if made is None
                        else PartsWriter(heading, made, **told)
                    )
                    await deliver(stream, writer, EventStream(send))
                elif (pieces := await deliver_whole(stream)) is not None:
                    whole = whole_choice(stream, pieces, made, codec=codec)
                    await send_json(send, 200, completion(heading, [whole], usage(stream)))

    async def _found(self, request_id: RequestId, tenant: str) -> Resumed:
        bucket = self.bus.bucket(REQUEST_RECORDS, RequestRecord)
        for look in range(_LOOKS):
            await asyncio.sleep(_LOOK_S if look else 0)
            kept = await bucket.get(request_id)
            if kept is not None and kept.value.tenant != tenant:
                continue  # another's looks like none, in time too
            if kept is not None and kept.value.head is not None:
                return Resumed(kept.value, kept.value.head)
            if kept is not None and kept.value.request_seq:
                text = "the answer cannot be resumed: it was not asked with 'x-diptych-resume: 1'"
                raise ApiError(400, text, code="not_resumable")
        raise ApiError(
            410,
            f"there is no answer 'chatcmpl-{request_id}' any more: the resume window has passed",
            code="resume_window_passed",
        )


def wanted_by_event_id(scope: Scope, *, include_usage: bool) -> Wanted | None:
    """What a repeated `POST` asks to go on with; None if it is a new one.

    Raises:
        InvalidRequest: the header is none of ours.
    """
    last_seen = _last_seen(scope)
    if not last_seen:
        return None
    request_id, after = _event(last_seen)
    return Wanted(request_id, after, include_usage=include_usage)


def wanted_by_query(scope: Scope) -> Wanted:
    """What path, query and `Last-Event-ID` of a `GET` ask for.

    Raises:
        ApiError: no such answer can be (404).
        InvalidRequest: names the parameter.
    """
    asked: str = scope["path_params"]["completion_id"]
    found = _ANSWER_ID.fullmatch(asked)
    if found is None:
        raise ApiError(404, f"there is no answer '{asked[:80]}'", code="not_found")
    given = parameters(scope)
    stream = flag(given.pop("stream", "false"), "stream")
    include_usage = flag(given.pop("include_usage", "false"), "include_usage")
    after, param = given.pop("starting_after", ""), "starting_after"
    if given:
        name = next(iter(given))[:80]
        raise InvalidRequest(f"unknown parameter '{name}'", param=name, code="unknown_parameter")
    last_seen = f"{found['request']}:{after}" if after else _last_seen(scope)
    if not last_seen:
        return Wanted(RequestId(found["request"]), stream=stream, include_usage=include_usage)
    request_id, index = _event(last_seen)
    if request_id != found["request"] or not stream:
        text = "expected an event of this answer, and 'stream=true' with it"
        raise InvalidRequest(text, param=param)
    return Wanted(request_id, index, include_usage=include_usage)


def _last_seen(scope: Scope) -> str:
    value: bytes = dict(scope["headers"]).get(b"last-event-id", b"")
    return value.decode("latin-1")


def _event(last_seen: str) -> tuple[RequestId, int]:
    found = _EVENT_ID.fullmatch(last_seen)
    if found is None:
        text = f"expected '<request id>:<index>' of a chat event, saw {last_seen[:60]!r}"
        raise InvalidRequest(text, param="last-event-id")
    return RequestId(found["request"]), int(found["index"])
