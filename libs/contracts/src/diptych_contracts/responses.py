"""A Responses object as bucket `responses` keeps it: enough for any gateway to rebuild its events.

While the request runs, the tokens stand in the journal of the gateway that took it; once it has
ended, its text stands here, cut into the same pieces.
"""

from diptych_contracts.answer_formats import AnswerFormat, Tool, ToolCall
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End
from diptych_contracts.requests import PriorityClass
from diptych_contracts.sampling import Sampling
from diptych_contracts.wire import Message

PREFIX = "resp_"


def response_id(request_id: RequestId) -> str:
    """A request's id as clients of the Responses API see it."""
    return f"{PREFIX}{request_id}"


class StoredMessage(Message, frozen=True, kw_only=True, tag="stored_message.1"):
    """One message of a conversation, as the chat template takes it."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    """What an assistant called."""
    call_id: str | None = None
    """Which call a tool's result answers."""
    reasoning: str = ""
    """What an assistant thought."""


class PartRef(Message, frozen=True, kw_only=True, tag="part_ref.1"):
    """A part of a response that is too large for its bucket: object `name` of `response-parts`."""

    name: str
    n_bytes: int


class StoredTurn(Message, frozen=True, kw_only=True, tag="stored_turn.1"):
    """The messages of a response, where they are an object of their own."""

    input: tuple[StoredMessage, ...]
    history: tuple[StoredMessage, ...] | None = None


class StoredText(Message, frozen=True, kw_only=True, tag="stored_text.1"):
    """The text of a response, where it is an object of its own."""

    deltas: tuple[str, ...]
    logprobs: tuple[bytes, ...] = ()


class StoredAnswer(Message, frozen=True, kw_only=True, tag="stored_answer.1"):
    """What a response came to."""

    deltas: tuple[str, ...]
    """Its text, one piece per token that yields text: what its events were."""
    tokens: int
    end: End
    ended_unix_s: int
    text: PartRef | None = None
    """Where `deltas` and `logprobs` are, if not here: a `StoredText`."""
    logprobs: tuple[bytes, ...] = ()
    """Of each of `deltas`, where they were asked for: a list as JSON, as its event told it."""


class StoredResponse(Message, frozen=True, kw_only=True, tag="stored_response.1"):
    """Everything a response says, its tokens apart."""

    request_id: RequestId
    gateway: Incarnation
    """Whose journal carries its tokens."""
    journal_seq: int
    """No token of it is at or before this sequence."""
    model: str
    created_unix_ms: int
    deadline_unix_ms: int
    prompt_tokens: int
    sampling: Sampling
    text_format: str = ""
    """`text.format` as its objects say it, in JSON; empty: free text."""
    max_output_tokens: int | None = None
    """As asked for."""
    instructions: str | None = None
    input: tuple[StoredMessage, ...]
    """This turn's own; the turns before it stand in `previous_response_id`."""
    previous_response_id: str | None = None
    history: tuple[StoredMessage, ...] | None = None
    """The turns before it where they are not stored: then nobody need look further."""
    store: bool = True
    background: bool = False
    service_tier: str = "default"
    priority_class: PriorityClass = PriorityClass.INTERACTIVE
    metadata: tuple[tuple[str, str], ...] = ()
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    answer: StoredAnswer | None = None
    """Set once, when it has ended."""
    tenant: str = "default"
    """Whose it is: nobody else is told that it exists."""
    turn: PartRef | None = None
    """Where `input` and `history` are, if not here: a `StoredTurn`."""
    answer_format: AnswerFormat | None = None
    """Which parts its answer has; None: text alone."""
    tools: tuple[Tool, ...] = ()
    tool_choice: str = '"auto"'
    """JSON, as asked for."""
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    secret: bytes = b""
    """The request's: its record goes long before its journal."""

    @property
    def response_id(self) -> str:
        """Its id as clients see it."""
        return response_id(self.request_id)

    @property
    def answer_id(self) -> str:
        """The same."""
        return self.response_id


class Attended(Message, frozen=True, kw_only=True, tag="attended.1"):
    """Clients of `reader` read these answers now; said again every few seconds while they do."""

    reader: Incarnation
    request_ids: tuple[RequestId, ...]
