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
_DEEP, _WORD = "\0deep", "\0word"
"""Kinds of text inside of tools and calls: any, and names."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


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
        self._inside = "\0".join(longest_first)
        """A name found in here could become one, between a template's own words."""

    def marked(self, messages: Messages, tools: Tools = None) -> tuple[str, Messages, Tools]:
        """The mark, and the messages and tools with it where a control token is or may come about.

        An empty mark says that there is nothing to break. Tools and calls hold text at any depth,
        keys included; templates compare such words with their own, so what is safe stays as it is.

        Raises:
            InvalidRequest: the messages hold every character that could be a mark.
        """
        texts = [*_texts(messages), *_nested("tools", tools)]
        if not any(self._suspect(key, text) for key, text in texts):
            return "", messages, tools
        known = [self._template, *(text for _, text in texts)]
        mark = next((m for m in map(chr, _MARKS) if not any(m in text for text in known)), None)
        if mark is None:
            raise InvalidRequest(
                "the messages hold control tokens of the model and all private-use characters",
                param="messages",
                code="invalid_text",
            )
        broken = [
            {
                key: self._broken(key, value, mark)
                if isinstance(value, str)
                else self._broken_within(value, mark)
                for key, value in message.items()
            }
            for message in messages
        ]
        return mark, broken, self._broken_within(tools, mark)

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
        if key == _WORD:  # of a tool or a call
            return text in self._inside
        if key not in ("content", _DEEP):  # templates put names into tokens of their own
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
        plain = key in ("content", _DEEP) or (key == _WORD and text not in self._inside)
        first = mark if not plain or self._begins_as_tail(text.strip()) else ""
        last = mark if not plain or self._ends_as_head(text.strip()) else ""
        return f"{before}{first}{core}{last}{after}"

    def _broken_within(self, value: Any, mark: str, key: str = "") -> Any:
        if isinstance(value, str):
            return self._broken(_WORD if key == "name" else _DEEP, value, mark)
        if isinstance(value, Mapping):
            return {
                self._broken(_DEEP, name, mark): self._broken_within(inner, mark, name)
                for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._broken_within(inner, mark) for inner in value]
        return value


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for message in messages:
        for key, value in message.items():
            if isinstance(value, str):
                yield key, value
            else:
                yield from _nested("", value)


def _nested(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """All text inside of `value`, keys included."""
    if isinstance(value, str):
        yield _WORD if key == "name" else _DEEP, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield _DEEP, name
            yield from _nested(name, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _nested("", inner)
