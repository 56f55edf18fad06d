"""What a journal says of one request: the fold that reader and recoverer share.

Rules, in stream order:

1. Tokens count only for the current attempt; a `Fence` makes its attempt current.
2. The answer is the contiguous run of tokens; one that comes early waits for the gap to close, a
   repeated one is dropped. A fence discards what still waits.
3. The first `End` of the current attempt ends the request. One that names its number of tokens
   waits until they are there; if one that names none comes meanwhile (a cancel, an expiry), that
   is the end: a token lost for good must not keep a request open. After the end nothing counts.
4. Where the request has a secret, a part counts only if its voice may say it (`voices`): an
   attempt's tokens and facts with the attempt's, a fence with the owner's, an end with either.
   Everything else is dropped and counted, as if it had not been said.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from diptych_contracts.ids import RequestId
from diptych_contracts.journal import (
    AttemptFailed,
    Chances,
    End,
    Fence,
    JournalEntry,
    Started,
    TokenEntry,
    TokenFrame,
)
from diptych_policy.voices import attempt_voice, owner_voice, same

JournalPart = TokenEntry | End | Fence | Started | AttemptFailed
"""The part of a journal entry that is about one request."""


def parts(entry: JournalEntry) -> Iterator[JournalPart]:
    """`entry`'s parts, each about one request, in the order they count."""
    if isinstance(entry, TokenFrame):
        yield from entry.entries
        yield from entry.ends
    else:
        yield entry


@dataclass(frozen=True, slots=True)
class Change:
    """What one part changed."""

    new_ids: tuple[int, ...] = ()
    """Tokens that now follow the answer so far."""
    end: End | None = None
    """Set once, when the request ends."""
    attempt: int | None = None
    """Set when a fence made a new attempt current."""


NOTHING = Change()
FORGED = Change()
"""Nothing either: the part was said with a wrong voice, by somebody who had no right to."""


def spoken(end: End, secret: bytes) -> End:
    """`end` as an owner or a gateway says it in the journal of the request with that secret."""
    return msgspec.structs.replace(end, voice=owner_voice(secret))


@dataclass(slots=True)
class RequestView:
    """The state of one request after some stretch of its journal."""

    request_id: RequestId
    attempt: int = 1
    token_ids: list[int] = field(default_factory=list)
    attempt_start: int = 0
    """How many tokens the answer had when the current attempt began."""
    end: End | None = None
    """Without its voice: that is the journal's affair."""
    secret: bytes = field(default=b"", repr=False)
    """The request's; empty: whoever speaks is believed."""
    forged: int = 0
    """Parts that were dropped for their voice."""
    logprobs: list[Chances] | None = None
    """Of each token, for whoever sets it to a list; () where the journal says none."""
    _early: dict[int, TokenEntry] = field(default_factory=dict)
    _early_end: End | None = None
    _voice: bytes = field(default=b"", init=False, repr=False)
    """The current attempt's."""
    _owner_voice: bytes = field(default=b"", init=False, repr=False)

    def __post_init__(self) -> None:
        self._voice = attempt_voice(self.secret, self.attempt)
        self._owner_voice = owner_voice(self.secret)

    @property
    def attempt_has_tokens(self) -> bool:
        """Whether the current attempt has added a token."""
        return len(self.token_ids) > self.attempt_start

    def apply(self, part: JournalPart) -> Change:
        """Fold one part of the journal in; parts of other requests must not come here."""
        if self.end is not None:
            return NOTHING
        match part:
            case TokenEntry(attempt=attempt) if attempt == self.attempt:
                if self.secret and not same(part.voice, self._voice):
                    return self._refuse()
                self._early.setdefault(part.index, part)
                return self._drain()
            case Fence(attempt=attempt) if attempt > self.attempt:
                return self._switch(attempt) if self._owner_says(part) else self._refuse()
            case End(attempt=attempt) if attempt == self.attempt:
                if not self._attempt_says(part) and not self._owner_says(part):
                    return self._refuse()
                if self._early_end is None or part.tokens is None:
                    self._early_end = part
                return self._drain()
            case Started(attempt=attempt) | AttemptFailed(attempt=attempt):
                if attempt == self.attempt and not self._attempt_says(part):
                    return self._refuse()
        return NOTHING

    def _attempt_says(self, part: JournalPart) -> bool:
        return not self.secret or same(part.voice, self._voice)

    def _owner_says(self, part: JournalPart) -> bool:
        return not self.secret or same(part.voice, self._owner_voice)

    def _refuse(self) -> Change:
        self.forged += 1
        return FORGED

    def _switch(self, attempt: int) -> Change:
        self.attempt = attempt
        self._voice = attempt_voice(self.secret, attempt)
        self.attempt_start = len(self.token_ids)
        self._early.clear()
        self._early_end = None
        return Change(attempt=attempt)

    def _drain(self) -> Change:
        before = len(self.token_ids)
        for index in sorted(self._early):
            if index > len(self.token_ids):
                break
            entry = self._early.pop(index)
            known = len(self.token_ids)
            self.token_ids.extend(entry.token_ids[known - index :])
            if self.logprobs is not None:
                told = entry.logprobs[known - index :][: len(self.token_ids) - known]
                self.logprobs.extend(told)
                self.logprobs.extend([()] * (len(self.token_ids) - len(self.logprobs)))
        end = self._early_end
        if end is not None and (end.tokens is None or end.tokens <= len(self.token_ids)):
            self.end = msgspec.structs.replace(end, voice=b"") if end.voice else end
            self._early.clear()
        return Change(new_ids=tuple(self.token_ids[before:]), end=self.end)
