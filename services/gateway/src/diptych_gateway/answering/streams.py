"""One request's answer on its way to one client.

The journal's follower feeds it token ids; its writer wakes, takes everything new at once, and
sends it with one write. So a slow client costs ids in a list (bounded by `max_tokens`), and a fast
one a wake-up per engine step: no task, queue entry or generator per token.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from diptych_contracts.answer_formats import AnswerFormat
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End
from diptych_contracts.requests import PriorityClass
from diptych_gateway.answering.chance_trail import ChanceTrail, TokenChance
from diptych_gateway.answering.forging import forged
from diptych_gateway.answering.patience import Patience
from diptych_gateway.errors import ApiError, from_end
from diptych_gateway.metrics import ModelMetrics
from diptych_policy.journal import FORGED, JournalPart, RequestView
from diptych_text.answer import AnswerText

MAX_TAKE = 256
"""About 80 KB of events: a slow client holds that and the socket's buffers, whatever waits."""


class Shown(msgspec.Struct, frozen=True, gc=False):
    """What one token made showable. A struct: a named tuple takes five times as long to make."""

    at: int
    """That token's index; the number of tokens for what was held back until the end."""
    text: str
    logprobs: tuple[TokenChance, ...] = ()
    """Of the tokens the text is made of, where they were asked for."""


class Asked(Protocol):
    """What the way out of an answer needs of its request: a stored response says it too."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def gateway(self) -> Incarnation: ...

    @property
    def tenant(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def deadline_unix_ms(self) -> int: ...

    @property
    def priority_class(self) -> PriorityClass: ...

    @property
    def secret(self) -> bytes: ...

    @property
    def answer_format(self) -> AnswerFormat | None: ...


class AnswerStream:
    """The state of one answer on its way to one client.

    Args:
        request: What was asked.
        text: Turns the answer's tokens into text, its stop strings included.
        patience: Its timers.
        arrived_s: When the client's request came in.
        metrics: Of the model.
        abort: Cuts the client's connection, even with bytes still unsent.
    """

    def __init__(
        self,
        request: Asked,
        *,
        text: AnswerText,
        patience: Patience,
        arrived_s: float,
        metrics: ModelMetrics,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self.request = request
        self.patience = patience
        self.arrived_s = arrived_s
        self.wake = asyncio.Event()
        self.eager = False
        """Whether tokens wake the writer, or only the end does."""
        self.ping = False
        """Whether a keep-alive is due."""
        self.gone = False
        """Whether the client has left."""
        self.refused = False
        """Whether JetStream said that it does not take the request: there is nothing to cancel."""
        self.stored = False
        """Whether JetStream has the request."""
        self.first_token_s: float | None = None
        self._last_token_s = arrived_s
        self._view = RequestView(request.request_id, secret=request.secret)
        self._held_back: list[tuple[int, JournalPart]] | None = None
        self._text = text
        self._trail: ChanceTrail | None = None
        self._taken = 0
        self._finished = False
        self._failure: ApiError | None = None
        self._metrics = metrics
        self._abort = abort

    @property
    def end(self) -> End | None:
        """The request's end, once the journal has said it."""
        return self._view.end

    @property
    def view(self) -> RequestView:
        """What the journal has said."""
        return self._view

    @property
    def attempt(self) -> int:
        """The current attempt."""
        return self._view.attempt

    @property
    def tokens(self) -> int:
        """How many tokens the answer has so far."""
        return len(self._view.token_ids)

    @property
    def failure(self) -> ApiError | None:
        """Why there will be no whole answer, once that is known."""
        if self._failure is None and self.end is not None:
            self._failure = from_end(self.end, produced=self.tokens > 0)
        return self._failure

    @property
    def ttft_s(self) -> float:
        """How long the first token took, as far as there is one."""
        first_s = self.first_token_s if self.first_token_s is not None else self._last_token_s
        return first_s - self.arrived_s

    def tell_logprobs(self) -> None:
        """Give the logprobs with the pieces; to be said before the journal is heard."""
        self._trail = ChanceTrail(self._text.spelling)
        self._view.logprobs = []

    def hold_back(self) -> None:
        """Let what is heard live wait until the journal before it was read."""
        self._held_back = []

    def caught_up(self, seq: int, *, now_s: float) -> None:
        """The journal was fed up to `seq`: go on with what was heard since."""
        waiting, self._held_back = self._held_back or [], None
        for heard_seq, part in waiting:
            if heard_seq > seq:
                self.feed(part, now_s=now_s)

    def hear(self, seq: int, part: JournalPart, *, now_s: float) -> None:
        """The journal's follower says `part`, which stands at `seq`."""
        if self._held_back is None:
            self.feed(part, now_s=now_s)
        else:
            self._held_back.append((seq, part))

    def feed(self, part: JournalPart, *, now_s: float) -> None:
        """Take in what the journal says."""
        change = self._view.apply(part)
        if change is FORGED:
            forged(self._view, part)
            return
        self.patience.heard()
        if change.new_ids:
            self._measure(len(change.new_ids), now_s)
        if change.end is not None:
            self.patience.ended()
            self.wake.set()
        elif self.eager and change.new_ids:
            self.wake.set()

    @property
    def over(self) -> bool:
        """Whether all text was taken, and none will follow."""
        return self._finished or (self._failure is not None and self._taken == self.tokens)

    def texts(self) -> Iterator[Shown]:
        """What can be shown since the last call: one piece per token that yields text, by index.

        What was held back until the end comes with the number of tokens as its index.

        The pieces are a function of the token ids alone, never of when they are taken. At most
        `MAX_TAKE` tokens are taken at once; if there are more, the writer is woken again.
        """
        return self._plain() if self._trail is None else self._told(self._trail)

    def _plain(self) -> Iterator[Shown]:
        ids = self._view.token_ids
        until = min(len(ids), self._taken + MAX_TAKE)
        while self._taken < until:
            text = self._text.push(ids[self._taken : self._taken + 1])
            self._taken += 1
            if text:
                yield Shown(self._taken - 1, text)
        if until < len(ids) or self.end is not None:
            yield from self._rest(until)

    def _told(self, trail: ChanceTrail) -> Iterator[Shown]:
        ids, logprobs = self._view.token_ids, self._view.logprobs
        assert logprobs is not None
        until = min(len(ids), self._taken + MAX_TAKE)
        while self._taken < until:
            at = self._taken
            trail.push(ids[at], logprobs[at])
            text = self._text.push(ids[at : at + 1])
            self._taken += 1
            if text:
                yield Shown(at, text, trail.shown(text))
        if until < len(ids) or self.end is not None:
            yield from self._rest(until)

    def _rest(self, until: int) -> Iterator[Shown]:
        """What was held back, once the last token was taken; it comes after that one's piece."""
        if until < self.tokens:
            self.wake.set()
        elif not self._finished:
            self._finished = True
            rest = self._text.finish()
            told: tuple[TokenChance, ...] = ()
            if self._trail is not None and not self._text.stopped:
                told = self._trail.rest()
            if rest or told:
                yield Shown(until, rest, told)

    def fail(self, failure: ApiError) -> None:
        """End it here, whatever the journal will say."""
        if self._failure is None and self.end is None:
            failure.should_retry = not self.tokens
            self._failure = failure
            self.wake.set()

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.wake.set()

    def disconnect(self) -> None:
        """Cut a client off that reads nothing."""
        if self._abort is not None:
            self._abort()
        self.leave()

    def keep_alive(self) -> None:
        """Send a sign of life."""
        self.ping = True
        self.wake.set()

    async def news(self) -> None:
        """Wait until there is something to do."""
        await self.wake.wait()
        self.wake.clear()

    def _measure(self, count: int, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
            self._metrics.first_token.observe(now_s - self.arrived_s)
            count -= 1
        elif count:
            self._metrics.inter_token.observe((now_s - self._last_token_s) / count)
        self._last_token_s = now_s
