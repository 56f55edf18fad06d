"""Control tokens that a client wrote are text: only those of the template steer the model.

A template puts messages between control tokens. Tokenized as a whole, `<|im_end|>` in a message
would be one too, and forge whatever comes after it. So a private-use character, the mark, breaks
every control token in a message before the template sees it; after rendering, what is still whole
is the template's own.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from diptych_contracts.errors import InvalidRequest

_MARKS = range(0xE000, 0xF900)
"""Private use: characters without a meaning."""


class Shield:
    """Breaks control tokens in messages, and finds those of a template.

    Args:
        texts: Of all control tokens. Such of one character cannot be broken.
        template: The chat template: a mark must not occur in it.
    """

    def __init__(self, texts: Collection[str], template: str) -> None:
        self._template = template
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._start = re.compile(
            f"(?=(?:{'|'.join(re.escape(t) for t in longest_first if len(t) > 1) or '(?!)'}))(.)",
            re.DOTALL,
        )
        self._openings = {text[:2] for text in longest_first}
        self._heads = {text[:end] for text in longest_first for end in range(1, len(text))}
        self._tails = {text[start:] for text in longest_first for start in range(1, len(text))}
        self._longest = max(map(len, longest_first), default=0)

    def marked(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """The mark, and the messages with it where a control token is or could come about.

        An empty mark says that there is nothing to break.

        Raises:
            InvalidRequest: the messages hold every character that could be a mark.
        """
        if not any(self._suspect(key, text) for key, text in _texts(messages)):
            return "", messages
        known = [self._template, *(text for _, text in _texts(messages))]
        mark = next((m for m in map(chr, _MARKS) if not any(m in text for text in known)), None)
        if mark is None:
            raise InvalidRequest(
                "the messages hold control tokens of the model and all private-use characters",
                param="messages",
                code="invalid_text",
            )
        return mark, [
            {
                key: self._broken(key, value, mark) if isinstance(value, str) else value
                for key, value in message.items()
            }
            for message in messages
        ]

    def pieces(self, rendered: str, mark: str) -> Iterator[tuple[bool, str]]:
        """What a template made of marked messages: (whether it is a control token, text)."""
        end = 0
        for match in self._whole.finditer(rendered):
            if match.start() > end:
                yield False, rendered[end : match.start()].replace(mark, "")
            yield True, match[0]
            end = match.end()
        if end < len(rendered):
            yield False, rendered[end:].replace(mark, "")

    def _suspect(self, key: str, text: str) -> bool:
        if key == "role":  # one of ours
            return False
        if key != "content":  # templates put names into tokens of their own
            return True
        if any(opening in text for opening in self._openings) and self._start.search(text):
            return True
        core = text.strip()
        return self._ends_as_head(core) or self._begins_as_tail(core)

    def _ends_as_head(self, core: str) -> bool:
        return any(core[-n:] in self._heads for n in range(1, min(self._longest, len(core) + 1)))

    def _begins_as_tail(self, core: str) -> bool:
        return any(core[:n] in self._tails for n in range(1, min(self._longest, len(core) + 1)))

    def _broken(self, key: str, text: str, mark: str) -> str:
        """Templates strip content: marks stand inside of its blank edges."""
        if key == "role":
            return text
        broken = self._start.sub(rf"\1{mark}", text)
        core = broken.strip()
        if not core:
            return broken
        before, _, after = broken.partition(core)
        first = mark if key != "content" or self._begins_as_tail(text.strip()) else ""
        last = mark if key != "content" or self._ends_as_head(text.strip()) else ""
        return f"{before}{first}{core}{last}{after}"


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for message in messages:
        for key, value in message.items():
            if isinstance(value, str):
                yield key, value
