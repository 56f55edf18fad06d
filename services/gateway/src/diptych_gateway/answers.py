"""What a client is sent: `chat.completion`, its chunks, and their usage.

A chunk with text is made once per token, so its JSON is cut once, around the text, into a head
and a tail; all else is encoded whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from diptych_contracts.cards import ModelCard
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import Report
from diptych_gateway.errors import ApiError
from diptych_gateway.streams import AnswerStream, Shown

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
"""One line: after an event with an `id` openai's client takes a blank line for an empty event."""

_NOTHING = -2
"""Before the first index."""
_TEXT_MARK = b'"content":"\\u0000"'
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


class PromptTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    diptych: PathTaken


class Delta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(msgspec.Struct, kw_only=True):
    index: int = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: str


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one answer says."""

    request_id: RequestId
    created_unix_s: int
    card: ModelCard

    @property
    def answer_id(self) -> str:
        """The request's id as clients see it."""
        return f"chatcmpl-{self.request_id}"

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
    )
    prompt_tokens, tokens = stream.request.prompt_tokens, stream.tokens
    # After a recovery delivered tokens are context too, and may have been cached with the prompt.
    details = PromptTokens(min(report.cached_tokens, prompt_tokens))
    return Usage(prompt_tokens, tokens, prompt_tokens + tokens, details, path)


def completion(heading: Heading, stream: AnswerStream, *, text: str) -> bytes:
    """A whole answer."""
    choice = Choice(message=AnswerMessage(content=text), finish_reason=finish_reason(stream))
    return _encode(
        Completion(
            id=heading.answer_id,
            created=heading.created_unix_s,
            model=heading.card.model,
            system_fingerprint=heading.fingerprint,
            choices=[choice],
            usage=usage(stream),
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
        choice: Which of the request's answers it is.
    """

    def __init__(
        self, heading: Heading, *, include_usage: bool, after: int = _NOTHING, choice: int = 0
    ) -> None:
        self._heading = heading
        self._choice = choice
        self._after = after
        self._include_usage = include_usage
        self._id = f"id: {heading.request_id}:".encode()
        whole = _encode(self._chunk(Delta(content="\0")))
        head, _, tail = whole.partition(_TEXT_MARK)
        self._head = b"\ndata: " + head + b'"content":'
        self._tail = tail + b"\n\n"

    def start(self) -> list[bytes]:
        """The first chunk: whose turn it is."""
        return self._unseen(-1, self._chunk(Delta(role="assistant", content="")))

    def texts(self, pieces: Iterable[Shown]) -> list[bytes]:
        """A chunk per piece of text."""
        return [self.text(index, text) for index, text, _ in pieces if index > self._after]

    def text(self, index: int, text: str) -> bytes:
        """Text that token `index` made showable."""
        return b"%b%d%b%b%b" % (self._id, index, self._head, _encode(text), self._tail)

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

    def _chunk(self, delta: Delta, *, finish_reason: str | None = None) -> Chunk:
        return Chunk(
            id=self._heading.answer_id,
            created=self._heading.created_unix_s,
            model=self._heading.card.model,
            system_fingerprint=self._heading.fingerprint,
            choices=[ChunkChoice(index=self._choice, delta=delta, finish_reason=finish_reason)],
            usage=None if self._include_usage else UNSET,
        )

    def _unseen(self, index: int, chunk: Chunk) -> list[bytes]:
        if index <= self._after:
            return []
        return [b"%b%d\ndata: %b\n\n" % (self._id, index, _encode(chunk))]
