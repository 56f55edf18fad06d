"""What may be shown of an answer: the one function worker and gateway share."""

from collections.abc import Iterable, Sequence

from diptych_text.detokenizing import Detokenizer, TokenBytes
from diptych_text.stopping import StopMatcher


class AnswerText:
    """The text of one answer, token by token.

    A pure function of the tokens: however they are dealt out, the texts joined are the same, and
    `stopped` turns true at the same token.

    Raises:
        InvalidRequest: for stop strings that `StopMatcher` refuses.
    """

    def __init__(self, codec: TokenBytes, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(codec)
        self._matcher = StopMatcher(stop)
        self.spelling: TokenBytes = codec
        """The bytes of tokens as they become text here."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the text before it was all shown."""
        return self._matcher.stopped

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is now safe to show; empty once stopped."""
        return "" if self.stopped else self._matcher.push(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        """The rest of the text, at the end of the answer; empty if stopped."""
        if self.stopped:
            return ""
        shown = self._matcher.push(self._detokenizer.finish())
        return shown + self._matcher.finish()
