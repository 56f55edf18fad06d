"""An accepted request, and the record of what became of it."""

from enum import StrEnum
from typing import Literal

from diptych_contracts.answer_formats import AnswerFormat
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End
from diptych_contracts.prompts import PromptRef
from diptych_contracts.sampling import Sampling, Stopping
from diptych_contracts.streams import GATEWAY_HEADER, SECRET_HEADER
from diptych_contracts.wire import Message


class PriorityClass(StrEnum):
    """Classes in the order they are served."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class Mode(StrEnum):
    """Where the two phases run."""

    LOCAL = "local"
    """One worker does both."""
    REMOTE = "remote"
    """A prefill worker hands its KV to a decode worker."""


class KvPath(StrEnum):
    """How a request's KV gets from its prefill to its decode (`policy.paths`)."""

    COLOCATED = "colocated"
    """Not at all: one worker does both phases."""
    DIS_GPU = "dis-gpu"
    """Straight into the decode worker's engine, which has kept a seat for it."""
    DIS_CPU = "dis-cpu"
    """It waits in the decode worker's host memory until there is a seat."""
    DIS_DISK = "dis-disk"
    """It waits on the decode worker's disk until there is a seat."""


class Forced(Message, frozen=True, kw_only=True, tag="forced.1"):
    """A path the client insists on (for tests and debugging)."""

    mode: Mode | None = None
    link: Literal["shm", "nixl", "tcp"] | None = None
    path: KvPath | None = None


class Deadlines(Message, frozen=True, kw_only=True, tag="deadlines.1"):
    """How long each stage may take, in seconds. All are on by default."""

    first_token_s: float = 60.0
    inter_token_s: float = 5.0
    total_s: float = 3600.0
    transfer_s: float = 10.0


class Request(Message, frozen=True, kw_only=True, tag="request.1"):
    """A request, tokenized: what stream `REQUESTS` stores until the request has ended."""

    request_id: RequestId
    gateway: Incarnation
    """Whose journal carries its tokens."""
    model: str
    tenant: str = "default"
    priority_class: PriorityClass = PriorityClass.INTERACTIVE
    prompt_ids: tuple[int, ...]
    """Empty where `prompt` says where they are."""
    sampling: Sampling
    stopping: Stopping
    deadlines: Deadlines = Deadlines()
    forced: Forced = Forced()
    created_unix_ms: int
    resume: bool = False
    """Its client may come back for the answer: without one it goes on for a grace."""
    background: bool = False
    """It goes on to its end, whoever leaves."""
    prompt: PromptRef | None = None
    """A prompt of more than `prompts.MAX_INLINE_TOKENS`."""
    answer_format: AnswerFormat | None = None
    """Which parts its answer has; None: text alone."""
    secret: bytes = b""
    """What the voices in its journal are made of (`policy.voices`): its gateway and the schedulers
    know it, workers and people never. Empty: who speaks is not checked."""

    @property
    def headers(self) -> dict[str, str]:
        """What is stored beside it: whom to tell, and with which voice, if it cannot be read."""
        found: dict[str, str] = {GATEWAY_HEADER: self.gateway}
        if self.secret:
            found[SECRET_HEADER] = self.secret.hex()
        return found

    @property
    def deadline_unix_ms(self) -> int:
        """End of the total deadline."""
        return self.created_unix_ms + int(self.deadlines.total_s * 1000)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens were read."""
        return len(self.prompt_ids) if self.prompt is None else self.prompt.tokens

    @property
    def head(self) -> "AnswerHead | None":
        """What its record says of the answer."""
        if not self.resume:
            return None
        return AnswerHead(
            model=self.model,
            created_unix_ms=self.created_unix_ms,
            prompt_tokens=self.prompt_tokens,
            stop=self.stopping.stop,
            top_logprobs=self.sampling.top_logprobs,
            priority_class=self.priority_class,
            answer_format=self.answer_format,
        )


class RecordState(StrEnum):
    """What the record says; finer states come from the journal."""

    QUEUED = "queued"
    ROUTED = "routed"
    CANCELLING = "cancelling"
    ENDING = "ending"
    CLOSED = "closed"


class Assignment(Message, frozen=True, kw_only=True, tag="assignment.1"):
    """Who works on an attempt. `prefill` is absent in `local` mode."""

    mode: Mode
    decode: Incarnation
    prefill: Incarnation | None = None
    link: str | None = None
    next_link: str | None = None
    """The link to take if `link` cannot be opened; None: there is no other, or `link` is forced."""
    last_link: str | None = None
    """The link to take if neither of the two can be opened."""
    apart: bool = False
    """Whether its workers are given to nobody else meanwhile."""
    path: KvPath | None = None
    """How its KV gets to its decode worker; None: of an older scheduler."""
    path_reason: str = ""
    """Why that one."""

    @property
    def entry(self) -> Incarnation:
        """The worker the job is sent to."""
        return self.prefill or self.decode

    @property
    def workers(self) -> tuple[Incarnation, ...]:
        """Everybody involved."""
        return (self.prefill, self.decode) if self.prefill else (self.decode,)


class AnswerHead(Message, frozen=True, kw_only=True, tag="answer_head.1"):
    """What any gateway needs to say an answer again, its tokens apart."""

    model: str
    created_unix_ms: int
    prompt_tokens: int
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    """Present where its tokens are told with their logprobs."""
    priority_class: PriorityClass = PriorityClass.INTERACTIVE
    answer_format: AnswerFormat | None = None


class Setback(Message, frozen=True, kw_only=True, tag="setback.1"):
    """Why an attempt did not finish."""

    attempt: int
    why: str
    workers: tuple[Incarnation, ...] = ()
    """Who had it, or gave it up."""
    lost: bool = False
    """Whether they died or fell silent, rather than said no."""
    apart: bool = False
    """Whether nothing else ran on them that could have been the reason."""
    unix_ms: int = 0


class RequestRecord(Message, frozen=True, kw_only=True, tag="request_record.1"):
    """The truth about one request: bucket `requests`, key = request id.

    Written by its owner by compare-and-swap; a gateway may only set `cancelling` and `ending`.
    """

    request_id: RequestId
    owner: Incarnation
    """The scheduler that answers for it; a gateway where it cancels before there is one."""
    gateway: Incarnation
    state: RecordState
    attempt: int = 1
    lost_attempts: int = 0
    """Attempts that ended by the death or silence of a worker."""
    strikes: int = 0
    """Of these, how many in a row brought next to nothing: `policy.suspicion`."""
    setbacks: tuple[Setback, ...] = ()
    """The last attempts that did not finish, oldest first."""
    adoptions: int = 0
    """In a row, without a token between them."""
    adopted_tokens: int = 0
    """How many tokens the answer had when it was last adopted."""
    assignment: Assignment | None = None
    request_seq: int = 0
    """Where stream `REQUESTS` holds the request."""
    journal_seq: int = 0
    """The last sequence of stream `TOKENS` before the first job: recovery reads from the next one,
    and knows by it whether the beginning is still there."""
    journal_end_seq: int = 0
    """Where the journal holds its end, once it is closed: a late reader reads no further."""
    head: AnswerHead | None = None
    """Present where its client may come back for the answer."""
    deadline_unix_ms: int = 0
    """End of the total deadline."""
    tenant: str = "default"
    """Whose it is: nobody else is told that it exists. Empty: nobody could read that."""
    prompt_tokens: int = 0
    cancel_reason: str = ""
    end: End | None = None
    """Without a voice: whoever publishes it speaks for himself."""
    secret: bytes = b""
    """The request's."""
