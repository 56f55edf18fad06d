"""One log out of many processes: their JSON lines made readable, quiet unless something matters."""

import json
from collections import defaultdict, deque
from typing import Any, TextIO

from diptych_telemetry.logs import LEVELS, render_text

_TAIL_LINES = 20
_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94)
_LEVEL_COLOURS = {"warning": 33, "error": 31}
# How nats-server marks its lines.
_MARKS = {"[WRN]": "warning", "[ERR]": "error", "[FTL]": "error"}
_KNOWN = ('"TLS Handshake First" option will fail to connect', "TLS handshake error: EOF")
"""What is as it should be: our clients do, and one that ends while it connects is no news."""


class MergedLog:
    """Writes lines of named processes to one stream.

    Args:
        out: Where to.
        level: The least level shown; lines that say none count as `debug`.
        colour: Whether the stream understands colours.
    """

    def __init__(self, out: TextIO, *, level: str = "warning", colour: bool = False) -> None:
        self._out = out
        self._least = LEVELS[level]
        self._colour = colour
        self._seen: dict[str, int] = {}
        self._width = 0
        self._tails: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_TAIL_LINES))

    def expect(self, names: list[str]) -> None:
        """Give each name its colour and all the same width."""
        self._width = max(map(len, names), default=0)
        self._seen = {name: number for number, name in enumerate(names)}

    def line(self, name: str, raw: bytes) -> None:
        """One line as process `name` wrote it."""
        text = raw.decode("utf-8", "replace").rstrip()
        event = _event(text)
        level = str(event["level"]) if event else _level_of(text)
        if LEVELS.get(level, LEVELS["error"]) >= self._least:
            self._write(name, render_text(event) if event else text, level)
        elif not event and text:
            self._tails[name].append(text)

    def say(self, name: str, text: str, level: str = "info") -> None:
        """One line of the supervisor's own about process `name`; always shown."""
        self._write(name, text, level)

    def plain(self, text: str) -> None:
        """Text for the user, as it is."""
        self._out.write(text + "\n")
        self._out.flush()

    def show_tail(self, name: str) -> None:
        """The last lines of `name` that were not shown and are no JSON: its last words."""
        for text in self._tails.pop(name, ()):
            self._write(name, text, "error")

    def _write(self, name: str, text: str, level: str) -> None:
        number = self._seen.setdefault(name, len(self._seen))
        prefix = self._painted(f"{name:<{self._width}} |", _COLOURS[number % len(_COLOURS)])
        for line in text.splitlines():
            self._out.write(f"{prefix} {self._painted(line, _LEVEL_COLOURS.get(level))}\n")
        self._out.flush()

    def _painted(self, text: str, colour: int | None) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour and colour else text


def _event(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event and "level" in event else None


def _level_of(text: str) -> str:
    if any(known in text for known in _KNOWN):
        return "debug"
    return next((level for mark, level in _MARKS.items() if mark in text), "debug")
