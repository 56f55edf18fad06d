"""What an answer is made of: text, reasoning, and calls of tools with their arguments."""

from typing import Any, NamedTuple


class Text(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """What the model said to itself before it answered."""

    text: str


class CallBegun(NamedTuple):
    """A call of a tool: its name is known, its arguments follow."""

    call: int
    """Counted from 0."""
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: joined, they are the JSON the model wrote."""

    call: int
    """Counted from 0."""
    text: str


Part = Text | Reasoning | CallBegun | CallArguments


class PartList:
    """Collects parts: neighbours of a kind are one, and blanks around calls are nobody's.

    Args:
        single: Only the first call counts; what the model says of others is dropped.
    """

    def __init__(self, *, single: bool = False) -> None:
        self._single = single
        self._parts: list[Part] = []
        self._blanks = ""
        self._edge = False
        """Whether blanks that come now are dropped: after reasoning and calls."""
        self.calls = 0
        self.thinking = False
        """Whether the newest text is reasoning."""

    def take(self) -> list[Part]:
        """The parts since the last time."""
        taken, self._parts = self._parts, []
        return taken

    def text(self, text: str) -> None:
        """Text; blanks at its end wait for what follows them."""
        text = self._blanks + text
        if self._edge:
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._edge = False
            self._add(Text(shown))

    def reasoning(self, text: str) -> None:
        """Reasoning; blanks around it are dropped."""
        self.thinking = True
        text = self._blanks + text
        if not self._edge:
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._edge = True
            self._add(Reasoning(shown))

    def edge(self) -> None:
        """Reasoning or a call ended here: drop the blanks around."""
        self._blanks, self._edge, self.thinking = "", True, False

    def call(self, name: str) -> None:
        """A call begins."""
        self.edge()
        self.calls += 1
        if not self._dropped:
            self._parts.append(CallBegun(self.calls - 1, name))

    def arguments(self, text: str) -> None:
        """More of its arguments."""
        if text and not self._dropped:
            self._add(CallArguments(self.calls - 1, text))

    def end(self) -> None:
        """Nothing follows: blanks at the end of text belong to it."""
        if self._blanks and not self._edge:
            self._add(Text(self._blanks))
        self._blanks = ""

    @property
    def _dropped(self) -> bool:
        return self._single and self.calls > 1

    def _add(self, part: Text | Reasoning | CallArguments) -> None:
        last: Any = self._parts[-1] if self._parts else None
        if type(last) is type(part) and last[:-1] == part[:-1]:
            self._parts[-1] = part._replace(text=last.text + part.text)
        else:
            self._parts.append(part)
