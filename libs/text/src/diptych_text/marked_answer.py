"""The text of an answer for its parser, markers included that are control tokens.

A control token is never shown, and stop strings are found as if it were not there: worker and
gateway must agree. So a marker goes around the stop matcher, and comes out behind the text before.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from diptych_contracts.answer_formats import AnswerFormat
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec
from diptych_text.detokenizing import TokenBytes
from diptych_text.formats import markers_of


def answer_text(
    codec: TextCodec, stop: Sequence[str] = (), made: AnswerFormat | None = None
) -> AnswerText:
    """What turns an answer's tokens into text: such as its parser reads, if it has one."""
    markers = {} if made is None else codec.control_ids(markers_of(made))
    if not markers:
        return AnswerText(codec, stop)
    return MarkedText(codec, stop, {token: text for text, token in markers.items()})


class _Spelling:
    def __init__(self, codec: TokenBytes, markers: Mapping[int, str]) -> None:
        self._codec = codec
        self._markers = {token: text.encode() for token, text in markers.items()}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, a marker's too."""
        return self._markers.get(token_id) or self._codec.token_bytes(token_id)


class MarkedText(AnswerText):
    """An `AnswerText` that shows some control tokens.

    Args:
        codec: Of the model.
        stop: See `AnswerText`.
        markers: What to show, by token.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], markers: Mapping[int, str]) -> None:
        super().__init__(codec, stop)
        self._markers = markers
        self.spelling = _Spelling(codec, markers)
        self._fed = self._shown = 0
        self._waiting: deque[tuple[int, str]] = deque()

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is now safe to show; empty once stopped."""
        pieces: list[str] = []
        for token in token_ids:
            if self.stopped:
                break
            marker = self._markers.get(token)
            if marker is None:
                text = self._detokenizer.push((token,))
                self._fed += len(text)
                pieces.append(self._with_markers(self._matcher.push(text)))
            else:
                self._waiting.append((self._fed, marker))
                pieces.append(self._with_markers(""))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, at the end of the answer; empty if stopped."""
        return self._with_markers(super().finish())

    def _with_markers(self, released: str) -> str:
        pieces: list[str] = []
        while self._waiting and self._waiting[0][0] <= self._shown + len(released):
            place, marker = self._waiting.popleft()
            count = place - self._shown
            pieces += (released[:count], marker)
            released, self._shown = released[count:], place
        self._shown += len(released)
        return "".join((*pieces, released))
