"""Steps of a parser that reads text as it comes.

A parser is a generator: straight-line code that stops where it needs more text. It takes all it can
of what there is, so what it has said after n characters is a function of these characters alone.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

T = TypeVar("T")
Steps = Generator[None, None, T]
Say = Callable[[str], None]

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]<]")
_CLOSER = {"{": "}", "[": "]"}
_text_decoder = msgspec.json.Decoder(str)


class Source:
    """Text as far as it has come, and how far it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._kept: list[int] = []

    def push(self, text: str) -> None:
        """More text."""
        start = self._kept[0] if self._kept else self.at
        self.text = self.text[start:] + text
        self.at -= start
        self._kept = [place - start for place in self._kept]

    def more(self) -> Steps[bool]:
        """Wait for more text; False: there will be none."""
        if self.ended:
            return False
        yield
        return not self.ended

    def keep(self) -> None:
        """Remember this place: `back` returns to the last one."""
        self._kept.append(self.at)

    def back(self) -> None:
        """Return to the place that was kept."""
        self.at = self._kept.pop()

    def release(self) -> None:
        """Whatever was read is read for good: something was said of it."""
        self._kept = []

    def rest(self, count: int) -> str:
        """Up to `count` characters that are there already."""
        return self.text[self.at : self.at + count]


class Markers:
    """Texts that a format puts between its parts; none begins another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts))
        self._firsts = {text[0] for text in texts}

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Where the first of them stands, and which."""
        found = [(place, t) for t in self.texts if (place := text.find(t, start)) >= 0]
        return min(found, default=None)

    def held(self, text: str, start: int) -> int:
        """How many characters at the end of `text` may become one."""
        most = min(self._longest - 1, len(text) - start)
        if most <= 0 or self._firsts.isdisjoint(text[-most:]):
            return 0
        return next((n for n in range(most, 0, -1) if text[-n:] in self._heads), 0)


def look(source: Source, count: int = 1) -> Steps[str]:
    """The next `count` characters, left where they are; fewer only at the end."""
    while len(source.text) - source.at < count:
        if not (yield from source.more()):
            break
    return source.rest(count)


def blanks(source: Source) -> Steps[str]:
    """Skip white space; gives the character after it, or nothing at the end."""
    while True:
        char = yield from look(source)
        if not char or not char.isspace():
            return char
        source.at += 1


def after_blanks(source: Source) -> Steps[str]:
    """The next character that is not blank, left where it is with all before it."""
    source.keep()
    char = yield from blanks(source)
    source.back()
    return char


def literal(source: Source, text: str) -> Steps[bool]:
    """Skip `text` if it comes next."""
    while (rest := source.rest(len(text))) != text:
        if not text.startswith(rest) or not (yield from source.more()):
            return False
    source.at += len(text)
    return True


def until(source: Source, markers: Markers, say: Say) -> Steps[str]:
    """Say everything before the first of `markers`, and stop in front of it; gives which one.

    Nothing at the end of the text.
    """
    while True:
        found = markers.find(source.text, source.at)
        if found is not None:
            say(source.text[source.at : found[0]])
            source.at = found[0]
            return found[1]
        end = len(source.text) - markers.held(source.text, source.at)
        if end > source.at:
            say(source.text[source.at : end])
            source.at = end
        if not (yield from source.more()):
            say(source.text[source.at :])
            source.at = len(source.text)
            return ""


def captured(source: Source, markers: Markers) -> Steps[tuple[str, str]]:
    """The text before the first of `markers`, and which one it is."""
    heard: list[str] = []
    marker = yield from until(source, markers, heard.append)
    return "".join(heard), marker


class _Nesting:
    """How deep inside of a JSON value the text is."""

    def __init__(self) -> None:
        self._open = ""
        self._quoted = False

    def scan(self, text: str, at: int) -> tuple[int, bool | None]:
        """How far the value goes, and whether it is whole there, broken, or not known yet."""
        while found := (_IN_STRING if self._quoted else _OUTSIDE).search(text, at):
            char, at = found[0], found.end()
            if char == "\\":
                if at == len(text):
                    return at - 1, None
                at += 1
                continue
            if char == '"':
                self._quoted = not self._quoted
            elif char in _CLOSER:
                self._open += _CLOSER[char]
            elif self._open.endswith(char):
                self._open = self._open[:-1]
            else:
                return found.start(), False
            if not (self._quoted or self._open):
                return at, True
        return len(text), None


def value(source: Source, say: Say) -> Steps[bool]:
    """Say a JSON value as it comes; False: it breaks off, or its brackets do not match."""
    if (yield from look(source)) not in ("{", "[", '"'):
        return (yield from _scalar(source, say))
    nesting = _Nesting()
    while True:
        end, whole = nesting.scan(source.text, source.at)
        _say_to(source, end, say)
        if whole is not None:
            return whole
        if not (yield from source.more()):
            return False


def _say_to(source: Source, end: int, say: Say) -> None:
    if end > source.at:
        say(source.text[source.at : end])
        source.at = end


def _scalar(source: Source, say: Say) -> Steps[bool]:
    heard = ""
    while (char := (yield from look(source))) and not _SCALAR_END.match(char):
        heard += char
        source.at += 1
    say(heard)
    return bool(heard)


def string(source: Source) -> Steps[str | None]:
    """A JSON string; None: there is none here."""
    if (yield from look(source)) != '"':
        return None
    heard: list[str] = []
    if not (yield from value(source, heard.append)):
        return None
    try:
        return _text_decoder.decode("".join(heard))
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
