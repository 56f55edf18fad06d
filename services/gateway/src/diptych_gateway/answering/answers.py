"""What a client is sent: `chat.completion`, its chunks, and their usage.

A chunk with text is made once per token, so its JSON is cut once, around the text, into a head
and a tail; all else is encoded whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from diptych_contracts.cards import ModelCard
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import Report
from diptych_gateway.answering.chance_trail import TokenChance
from diptych_gateway.answering.logprob_objects import ChoiceLogprobs, token_logprobs
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_gateway.errors import ApiError
from diptych_text.codec import TextCodec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
"""One line: after an event with an `id` openai's client takes a blank line for an empty event."""

_NOTHING = -2
"""Before the first index."""
_TEXT_MARK = b'"\\u0000"'
_LOGPROBS_MARK = b'"\\u0001"'
_encode = msgspec.json.Encoder().encode


class Joules(msgspec.Struct):
    prefill: float
    decode: float
    total: float


class PathTaken(msgspec.Struct):
    """The extension `usage.diptych`: how the answer came about."""

    mode: str
    prefill_worker: str
    decode_worker: str
    link: str
    attempt: int
    ttft_ms: float
    prefill_wait_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_bytes: int
    decode_ms: float
    joules: Joules
    energy_source: str
    engine: str
    path: str
    parked_ms: float


class PromptTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    diptych: PathTaken


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True, kw_only=True):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: ChoiceLogprobs | msgspec.Raw | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[msgspec.Struct]
    usage: Usage | UnsetType | None = UNSET


class WholeFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""


class WholeCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: WholeFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    refusal: None = None
    tool_calls: list[WholeCall] | UnsetType = UNSET


class Choice(msgspec.Struct, kw_only=True):
    index: int = 0
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[msgspec.Struct]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one answer says."""

    request_id: RequestId
    created_unix_s: int
    card: ModelCard
    prefix: str = "chatcmpl-"

    @property
    def answer_id(self) -> str:
        """The request's id as clients see it."""
        return f"{self.prefix}{self.request_id}"

    @property
    def fingerprint(self) -> str:
        """Changes whenever the weights do."""
        print_ = self.card.fingerprint
        return f"fp_{print_.base[:12]}_{print_.weights}"


def finish_reason(stream: AnswerStream) -> str:
    """Why an answer that is complete is."""
    assert stream.end is not None
    return stream.end.reason.value


def usage(stream: AnswerStream) -> Usage:
    """What an answer that has ended took."""
    end = stream.end
    assert end is not None
    report = end.report or Report(attempt=end.attempt)
    joules = Joules(report.prefill_j, report.decode_j, report.prefill_j + report.decode_j)
    path = PathTaken(
        mode=report.mode,
        prefill_worker=report.prefill_worker,
        decode_worker=report.decode_worker,
        link=report.link,
        attempt=report.attempt,
        ttft_ms=round(stream.ttft_s * 1000, 3),
        prefill_wait_ms=report.prefill_wait_ms,
        prefill_ms=report.prefill_ms,
        transfer_ms=report.transfer_ms,
        transfer_bytes=report.transfer_bytes,
        decode_ms=report.decode_ms,
        joules=joules,
        energy_source=report.energy_source,
        engine=report.engine,
        path=report.path,
        parked_ms=report.parked_ms,
    )
    prompt_tokens, tokens = stream.request.prompt_tokens, stream.tokens
    # After a recovery delivered tokens are context too, and may have been cached with the prompt.
    details = PromptTokens(min(report.cached_tokens, prompt_tokens))
    return Usage(prompt_tokens, tokens, prompt_tokens + tokens, details, path)


def total_usage(streams: Sequence[AnswerStream], prompts: int = 1) -> Usage:
    """What several answers took: to each of `prompts`, as many in a row; each was read once.

    `diptych` tells the path of the first, and the energy of all.
    """
    each = [usage(stream) for stream in streams]
    firsts = each[:: len(each) // prompts]
    total = each[0]
    total.prompt_tokens = sum(first.prompt_tokens for first in firsts)
    total.completion_tokens = sum(one.completion_tokens for one in each)
    total.total_tokens = total.prompt_tokens + total.completion_tokens
    total.prompt_tokens_details = PromptTokens(
        sum(first.prompt_tokens_details.cached_tokens for first in firsts)
    )
    prefill_j = sum(one.diptych.joules.prefill for one in each)
    decode_j = sum(one.diptych.joules.decode for one in each)
    total.diptych.joules = Joules(prefill_j, decode_j, prefill_j + decode_j)
    return total


def completion(
    heading: Heading,
    choices: Sequence[msgspec.Struct],
    used: Usage,
    *,
    kind: str = "chat.completion",
) -> bytes:
    """All whole answers of a call."""
    return _encode(
        Completion(
            id=heading.answer_id,
            object=kind,
            created=heading.created_unix_s,
            model=heading.card.model,
            system_fingerprint=heading.fingerprint,
            choices=choices,
            usage=used,
        )
    )


class ChunkWriter:
    """Server-sent events of one answer.

    Each carries `id: <request id>:<index>`: of the token whose text it holds, -1 for the first,
    and after the last token n-1: n for text held back until the end, n+1 for the last chunk, n+2
    for the usage. So a client may go on after any.

    Args:
        heading: What every chunk says.
        include_usage: Whether the usage is told.
        after: The last index the client has; nothing up to it is said again.
        choice: Which of the call's answers it is; of one that has several none has an `id`, since
            they cannot be taken up again.
        codec: Spells logprobs, if they were asked for.
    """

    kind = "chat.completion.chunk"

    def __init__(
        self,
        heading: Heading,
        *,
        include_usage: bool,
        after: int = _NOTHING,
        choice: int | None = None,
        codec: TextCodec | None = None,
    ) -> None:
        self._heading = heading
        self.choice = choice or 0
        self._codec = codec
        self._after = after
        self._include_usage = include_usage
        self._numbered = choice is None
        self._id = f"id: {heading.request_id}:".encode()
        told = None if codec is None else msgspec.Raw(_LOGPROBS_MARK)
        whole = _encode(self._chunk(Delta(content="\0"), logprobs=told))
        head, _, tail = whole.partition(_TEXT_MARK)
        self._head = b"data: " + head
        if self._numbered:
            self._head = b"\n" + self._head
        self._middle, _, self._end = tail.partition(_LOGPROBS_MARK)
        self._tail = tail + b"\n\n"
        self._end += b"\n\n"

    def start(self) -> list[bytes]:
        """The first chunk: whose turn it is."""
        return self.delta(-1, Delta(role="assistant", content=""))

    def texts(self, pieces: Iterable[Shown]) -> list[bytes]:
        """A chunk per piece of text."""
        if self._codec is not None:
            codec = self._codec
            return [self._told(codec, shown) for shown in pieces if shown.at > self._after]
        if not self._numbered:
            return [self._head + _encode(shown.text) + self._tail for shown in pieces]
        id_, after, head, tail = self._id, self._after, self._head, self._tail
        return [
            b"%b%d%b%b%b" % (id_, shown.at, head, _encode(shown.text), tail)
            for shown in pieces
            if shown.at > after
        ]

    def logprobs(self, codec: TextCodec, told: Sequence[TokenChance]) -> msgspec.Struct:
        """What a chunk says of the tokens of its text."""
        return ChoiceLogprobs(token_logprobs(codec, told))

    def _told(self, codec: TextCodec, shown: Shown) -> bytes:
        logprobs = _encode(self.logprobs(codec, shown.logprobs))
        number = b"%b%d" % (self._id, shown.at) if self._numbered else b""
        parts = (number, self._head, _encode(shown.text), self._middle, logprobs, self._end)
        return b"".join(parts)

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """Something else that token `index` brought about."""
        return self._unseen(index, self._chunk(delta))

    def finish(self, stream: AnswerStream, reason: str | None = None) -> list[bytes]:
        """The last chunk of this choice: why it is complete."""
        chunk = self._chunk(Delta(), finish_reason=reason or finish_reason(stream))
        return self._unseen(stream.tokens + 1, chunk)

    def total(self, used: Usage, index: int) -> list[bytes]:
        """The usage of all choices, if it was asked for, and the end mark."""
        if not self._include_usage:
            return [DONE]
        chunk = self._chunk(Delta())
        chunk.choices = []
        chunk.usage = used
        return [*self._unseen(index, chunk), DONE]

    def last(self, stream: AnswerStream) -> list[bytes]:
        """The last chunk, the usage if it was asked for, and the end mark; or why it failed."""
        if stream.failure is not None:
            return self.failed(stream.failure)
        return [*self.finish(stream), *self.total(usage(stream), stream.tokens + 2)]

    def failed(self, failure: ApiError) -> list[bytes]:
        """An error after the first byte; the connection's end follows it."""
        return [b"data: " + failure.late_body + b"\n\n"]

    def _chunk(
        self,
        delta: Delta,
        *,
        finish_reason: str | None = None,
        logprobs: msgspec.Raw | None = None,
    ) -> Chunk:
        return Chunk(
            id=self._heading.answer_id,
            object=self.kind,
            created=self._heading.created_unix_s,
            model=self._heading.card.model,
            system_fingerprint=self._heading.fingerprint,
            choices=[self.said(delta, finish_reason, logprobs)],
            usage=None if self._include_usage else UNSET,
        )

    def said(
        self, delta: Delta, finish_reason: str | None, logprobs: msgspec.Raw | None
    ) -> msgspec.Struct:
        """What a chunk says of its choice."""
        return ChunkChoice(
            index=self.choice, delta=delta, logprobs=logprobs, finish_reason=finish_reason
        )

    def _unseen(self, index: int, chunk: Chunk) -> list[bytes]:
        if index <= self._after:
            return []
        if not self._numbered:
            return [b"data: %b\n\n" % _encode(chunk)]
        return [b"%b%d\ndata: %b\n\n" % (self._id, index, _encode(chunk))]
