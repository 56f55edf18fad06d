"""One turn of the Responses API, however it came in: its history, its request, its events."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import time

import msgspec

from diptych_contracts.errors import ContextOverflow, InvalidRequest, Transient
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Request
from diptych_contracts.responses import StoredAnswer, StoredMessage, StoredResponse
from diptych_gateway.admission.accepting import room
from diptych_gateway.admission.generating import Arrival, Generations
from diptych_gateway.admission.models import Models, ServedModel
from diptych_gateway.answering.logprob_objects import logprobs_json
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_gateway.errors import ApiError
from diptych_gateway.idempotency.header import Once
from diptych_gateway.idempotency.joining import Joining
from diptych_gateway.judging.message_checks import check_count
from diptych_gateway.keeping.archive import Archive
from diptych_gateway.keeping.resuming import Resumption
from diptych_gateway.keeping.stored_answers import stored_answer
from diptych_gateway.responses.checking import ResponseCall
from diptych_gateway.responses.events import Event, ResponseEvents
from diptych_gateway.responses.items import spoken
from diptych_gateway.responses.objects import has_item, items
from diptych_gateway.responses.part_events import events_of
from diptych_telemetry import logger
from diptych_text.codec import TextCodec
from diptych_text.marked_answer import answer_text
from diptych_text.metering import MAX_CHARS

MAX_TURNS = 512
"""Longest chain of responses that is followed: each is one read of the bucket."""
MAX_HISTORY_CHARS = MAX_CHARS
"""Longest conversation that is put together: no template renders more."""
AT_HAND_CHARS = 256 * 1024
"""Longest stored conversation that a connection remembers: longer ones are read again."""
_ARCHIVE_S = 2.0
"""How long a last event waits for its response to be archived; then it goes out anyhow."""

History = tuple[StoredMessage, ...]


@dataclass(frozen=True, slots=True)
class Past:
    """The turns before one."""

    messages: History
    stored: bool = True
    """Whether they can be found again by the id of the last."""

    @property
    def chars(self) -> int:
        """How much text they are."""
        return sum(map(message_chars, self.messages))


log = logger(__name__)


@dataclass(slots=True)
class Turn:
    """A response, the way out of its answer, and its events."""

    stored: StoredResponse
    stream: AnswerStream
    events: ResponseEvents
    asked: Past | None = None
    """All messages before its answer, instructions apart; None: too long to be kept at hand, but
    the archive has them."""
    codec: TextCodec | None = None
    """Spells its logprobs, if they were asked for."""
    ended_unix_s: int | None = field(default=None, init=False)
    """When it ended, once that is known."""

    def delta(self, piece: Shown) -> list[Event]:
        """The events of a piece of the answer."""
        if self.codec is None:
            return self.events.delta(piece.text)
        return self.events.delta(piece.text, logprobs_json(self.codec, piece.logprobs))

    def answer(self) -> StoredAnswer:
        """What it came to; there must be an end, and all text made into events."""
        end = self.stream.end
        assert end is not None
        if self.ended_unix_s is None:
            self.ended_unix_s = int(time())
        return StoredAnswer(
            deltas=self.events.deltas,
            logprobs=self.events.logprobs,
            tokens=self.stream.tokens,
            end=end,
            ended_unix_s=self.ended_unix_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Makes turns, new ones and such as run already."""

    generations: Generations
    models: Models
    archive: Archive
    resumption: Resumption
    joining: Joining

    @asynccontextmanager
    async def new(
        self,
        call: ResponseCall,
        arrival: Arrival,
        *,
        local: Mapping[str, Past] | None = None,
        stream_id: str | None = None,
        once: Once | None = None,
    ) -> AsyncIterator[Turn]:
        """A turn whose request is stored, inside the `async with`.

        Args:
            call: What is wanted.
            arrival: How it came in.
            local: Earlier turns that are not stored but known to the connection.
            stream_id: The lane on a WebSocket.
            once: What makes it a turn that runs once, if it is one.

        Raises:
            ApiError: the response before it is unknown (400), still runs (409), or it is too large
                to be stored (413).
        """
        tenant = arrival.caller.tenant
        past = await self.past(call.body.previous_response_id, local or {}, tenant=tenant)
        made: list[StoredResponse] = []

        async def prepare(request: Request, served: ServedModel) -> str:
            made.append(await self._keep(self._stored(call, request, past)))
            return made[0].response_id

        asked = Past((*past.messages, *call.input), stored=call.store)
        at_hand = not asked.stored or asked.chars <= AT_HAND_CHARS
        generation = call.generation(past.messages)
        try:
            answer = self.joining.accepted(generation, arrival, prepare, once=once)
            async with answer as accepted:
                stored = made[0] if made else _told(self._stored(call, accepted.request, past))
                events = events_of(stored, stream_id=stream_id)
                made.clear()
                turn = Turn(
                    stored,
                    accepted.stream,
                    events,
                    asked if at_hand else None,
                    speller(stored, accepted.served),
                )
                turn.ended_unix_s = accepted.ended_unix_s
                # While the answer lasts nobody needs the messages, megabytes perhaps.
                call, past = replace(call, input=()), Past(())
                del asked, generation
                yield turn
        finally:
            if made and made[0].store:  # its request was not: nobody knows its id
                await self._forget(made[0])

    async def _keep(self, stored: StoredResponse) -> StoredResponse:
        """Store what is to be stored; gives it without messages that its events do not say."""
        if stored.store:
            stored = await self.archive.create(stored)
        return _told(stored)

    @asynccontextmanager
    async def again(
        self, stored: StoredResponse, arrival: Arrival, *, after: int = -1
    ) -> AsyncIterator[Turn]:
        """A turn that runs already, for one more reader.

        Raises:
            ApiError: its text is gone (410).
            Transient: the bus is away, or nobody serves its model at the moment.
        """
        served = self.models.get(stored.model)
        codec = speller(stored, served)
        stream = self.generations.stream(stored, served.codec, arrival, logprobs=codec is not None)
        async with self.resumption.reading(stream, stored):
            events = events_of(stored, after=after)
            yield Turn(stored, stream, events, codec=codec)

    @asynccontextmanager
    async def warming(
        self, call: ResponseCall, arrival: Arrival, *, local: Mapping[str, Past]
    ) -> AsyncIterator[Turn]:
        """A turn that computes the KV of its prompt and says nothing; `warmed` ends it.

        It is a request for one token, which nobody is shown, and whoever leaves has cancelled it.
        Raises what `new` raises.
        """
        past = await self.past(call.body.previous_response_id, local, tenant=arrival.caller.tenant)
        wanted = call.generation(past.messages)
        generation = replace(wanted, max_tokens=1, resume=False, background=False)
        made: list[StoredResponse] = []

        async def prepare(request: Request, served: ServedModel) -> str:
            room(
                wanted.max_tokens,
                request.prompt_tokens,
                context_tokens=served.card.context_tokens,
                default_tokens=1,
                param=wanted.messages_param,
            )
            made.append(self._stored(call, request, past))
            return made[0].response_id

        async with self.generations.accepted(generation, arrival, prepare) as accepted:
            (stored,) = made
            asked = Past((*past.messages, *call.input), stored=call.store)
            yield Turn(stored, accepted.stream, ResponseEvents(stored), asked)

    async def warmed(self, turn: Turn) -> StoredAnswer:
        """The answer, which is empty, of a turn that warmed up; a later turn can build on it."""
        end = turn.stream.end
        assert end is not None
        end = msgspec.structs.replace(end, reason=EndReason.STOP, tokens=0)
        nothing = StoredAnswer(deltas=(), tokens=0, end=end, ended_unix_s=int(time()))
        await self._keep(msgspec.structs.replace(turn.stored, answer=nothing))
        return nothing

    async def settle(self, turn: Turn) -> None:
        """Archive a turn that has ended, so that whoever hears of its end can build on it."""
        if turn.stored.store:
            request_id = turn.stored.request_id
            await self.archive.finish(request_id, turn.answer, timeout_s=_ARCHIVE_S)

    async def as_it_stands(self, stored: StoredResponse) -> StoredResponse:
        """`stored` with its answer, if it has ended; archives it where nobody else did."""
        if stored.answer is not None:
            return stored
        found = await self.resumption.end_of(stored)
        if found is None:
            return stored
        codec = self.models.get(stored.model).codec
        text = answer_text(codec, made=stored.answer_format)
        answer = stored_answer(found, text, codec, ended_unix_s=int(time()))
        self.archive.finish_soon(stored.request_id, lambda: answer)
        return msgspec.structs.replace(stored, answer=answer)

    async def past(self, last: str | None, local: Mapping[str, Past], *, tenant: str) -> Past:
        """The messages up to and including the answer of response `last`.

        Raises:
            ApiError: one of the chain is unknown (400) or still runs (409).
        """
        if last is not None and last in local:
            return local[last]
        turns: list[History] = []
        messages = chars = 0
        wanted = last
        while wanted is not None:
            if len(turns) == MAX_TURNS:
                text = f"expected a conversation of at most {MAX_TURNS} turns, saw a longer one"
                raise InvalidRequest(text, param="previous_response_id")
            stored = await self._previous(wanted, tenant)
            turns.append((*(stored.history or ()), *stored.input, *said(stored)))
            messages += len(turns[-1])
            chars += sum(map(message_chars, turns[-1]))
            check_count(messages, "messages in a conversation", param="previous_response_id")
            if chars > MAX_HISTORY_CHARS:
                text = f"the conversation has more than {MAX_HISTORY_CHARS} characters"
                raise ContextOverflow(text, param="previous_response_id")
            wanted = stored.previous_response_id if stored.history is None else None
        return Past(tuple(message for turn in reversed(turns) for message in turn))

    async def _previous(self, wanted: str, tenant: str) -> StoredResponse:
        stored = await self.archive.get(wanted, tenant=tenant)
        if stored is None:
            raise ApiError(
                400,
                f"the previous response '{wanted[:80]}' was not found",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        stored = await self.as_it_stands(await self.archive.with_messages(stored))
        if stored.answer is None:
            raise ApiError(
                409,
                f"the previous response '{wanted}' is still in progress",
                code="previous_response_in_progress",
                param="previous_response_id",
            )
        return stored

    def _stored(self, call: ResponseCall, request: Request, past: Past) -> StoredResponse:
        body = call.body
        return StoredResponse(
            request_id=request.request_id,
            gateway=request.gateway,
            journal_seq=self.generations.in_flight.journal_seq,
            model=request.model,
            tenant=request.tenant,
            created_unix_ms=request.created_unix_ms,
            deadline_unix_ms=request.deadline_unix_ms,
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            text_format=call.structure.echo,
            max_output_tokens=body.max_output_tokens,
            instructions=body.instructions,
            input=call.input,
            previous_response_id=body.previous_response_id,
            history=None if past.stored else past.messages,
            store=call.store,
            background=call.background,
            service_tier="flex" if body.service_tier == "flex" else "default",
            priority_class=request.priority_class,
            metadata=tuple(call.metadata.items()),
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            answer_format=request.answer_format,
            tools=call.offered.tools,
            tool_choice=call.offered.choice,
            parallel_tool_calls=call.offered.parallel,
            reasoning_effort=call.effort,
            secret=request.secret,
        )

    async def _forget(self, stored: StoredResponse) -> None:
        try:
            await self.archive.delete(stored)
        except Transient as err:  # it expires by itself
            log.warning("response_left_over", request_id=stored.request_id, error=str(err))


def _told(stored: StoredResponse) -> StoredResponse:
    """`stored` without messages that its events do not say."""
    return msgspec.structs.replace(stored, input=(), history=None)


def speller(stored: StoredResponse, served: ServedModel) -> TextCodec | None:
    """What spells a response's logprobs, if they were asked for."""
    return None if stored.sampling.top_logprobs is None else served.codec


def said(stored: StoredResponse, answer: StoredAnswer | None = None) -> History:
    """An answer (`stored`'s own, if none is given) as the message the next turn reads, if any."""
    answer = answer or stored.answer
    if answer is None or not has_item(answer):
        return ()
    if stored.answer_format is not None:
        message = spoken(items(stored, answer))
        return () if message is None else (message,)
    return (StoredMessage(role="assistant", text="".join(answer.deltas)),)


def message_chars(message: StoredMessage) -> int:
    """How much text a message is."""
    calls = sum(len(call.name) + len(call.arguments) for call in message.calls)
    return len(message.text) + len(message.reasoning) + calls
