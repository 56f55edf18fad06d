"""What came in one turn of the event loop, as one `StepReport`.

An engine that schedules by itself has no steps to be heard of. So whatever its sequences say in the
same turn is told at once, and costs what passed since tokens were last told of while it was busy.
"""

import asyncio
from collections.abc import Callable, Iterable

from diptych_engine.port import NewTokens, SequenceKey, StepNews, StepReport


class TurnReports:
    """Collects a turn's news. Used on one event loop.

    Args:
        loop: Whose turns.
        listener: Told once per turn in which there was anything.
        clock: Seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: Callable[[StepReport], None],
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._clock = clock
        self._busy_since_s: float | None = None
        self._spent_s = 0.0
        self._due = False
        self._begin()

    def _begin(self) -> None:
        self._news: list[StepNews] = []
        self._tokens: dict[SequenceKey, int] = {}
        self._prefill_tokens = self._decode_tokens = self._accepted_drafts = 0
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def busy(self, *, busy: bool) -> None:
        """Say whether the engine computes from now on: idle time is nobody's."""
        since_s, now_s = self._busy_since_s, self._clock()
        if busy:
            self._busy_since_s = now_s if since_s is None else since_s
            return
        if since_s is not None and self._tokens:
            self._spent_s += now_s - since_s
        self._busy_since_s = None

    def tell(self, news: StepNews) -> None:
        """Add what costs nothing."""
        self._news.append(news)
        self._wake()

    def tell_tokens(self, news: NewTokens, *, prompt_tokens: int, accepted_drafts: int = 0) -> None:
        """Add tokens.

        Args:
            news: They.
            prompt_tokens: How many were computed before them and not told of yet.
            accepted_drafts: How many of them were drafted.
        """
        decoded = len(news.token_ids) if not prompt_tokens else max(0, len(news.token_ids) - 1)
        if computed := prompt_tokens + decoded:
            self._tokens[news.key] = self._tokens.get(news.key, 0) + computed
        self._prefill_tokens += prompt_tokens
        self._decode_tokens += decoded
        self._accepted_drafts += accepted_drafts
        self.tell(news)

    def blocks(self, *, stored: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        """Add blocks that can be reused from now on, and those that no longer can."""
        for block in removed:
            _note(block, self._removed, opposite=self._stored)
        for block in stored:
            _note(block, self._stored, opposite=self._removed)
        if self._stored or self._removed:
            self._wake()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._due = False
        report = StepReport(
            news=self._news,
            duration_s=self._took_s(),
            tokens_by_key=self._tokens,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            accepted_drafts=self._accepted_drafts,
            blocks_stored=tuple(self._stored),
            blocks_removed=tuple(self._removed),
        )
        self._begin()
        self._listener(report)

    def _took_s(self) -> float:
        if not self._tokens:
            return 0.0
        spent_s, self._spent_s = self._spent_s, 0.0
        if self._busy_since_s is None:
            return spent_s
        since_s, self._busy_since_s = self._busy_since_s, self._clock()
        return spent_s + self._busy_since_s - since_s


def _note(block: int, happened: dict[int, None], *, opposite: dict[int, None]) -> None:
    if block in opposite:
        del opposite[block]
    else:
        happened[block] = None
