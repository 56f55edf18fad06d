"""Calls written as JSON objects: `{"name": …, "arguments": {…}}`, alone or in a list.

Arguments are said as they come once the name is known; a model that writes them first has them
held back until its name. What is no call leaves the source where it stood.
"""

from dataclasses import dataclass

import msgspec

from diptych_text.parts import PartList
from diptych_text.scanning import Source, Steps, after_blanks, blanks, string, value

MAX_NAME_CHARS = 256
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class _Head:
    """What is known of a call."""

    name: str = ""
    held: str = ""
    """Arguments that came before the name."""
    begun: bool = False


def call_object(source: Source, out: PartList, *, bare: bool = False) -> Steps[bool]:
    """One call at the cursor; False: there is none.

    `bare`: no marker says that it is one, so it must have arguments.
    """
    head = _Head()
    source.keep()
    place = yield from blanks(source)
    if place != "{":
        return _none(source)
    while place in ("{", ","):
        source.at += 1
        if (yield from blanks(source)) == "}":
            place = "}"
            break
        if not (yield from _field(source, out, head)):
            return head.begun or _none(source)
        if head.begun:
            yield from _rest(source)
            return True
        place = yield from blanks(source)
    if place != "}" or not head.name or (bare and not head.held):
        return _none(source)
    source.at += 1
    source.release()
    out.call(head.name)
    out.arguments(_plain(head.held))
    return True


def _field(source: Source, out: PartList, head: _Head) -> Steps[bool]:
    """One key and its value; False: they are not whole."""
    key = yield from _key(source)
    if key is None:
        return False
    if key in _ARGUMENTS and head.name:
        head.begun = True
        source.release()
        out.call(head.name)
        return (yield from arguments(source, out))
    if key in _NAMES and not head.name:
        head.name = (yield from string(source)) or ""
        return 0 < len(head.name) <= MAX_NAME_CHARS
    heard: list[str] = []
    whole = yield from value(source, heard.append)
    if key in _ARGUMENTS:
        head.held = "".join(heard)
    return whole


def arguments(source: Source, out: PartList) -> Steps[bool]:
    """The arguments of a call that was begun; False: they break off.

    A model may write them as a string that holds JSON, or as `null`.
    """
    if (yield from blanks(source)) == "{":
        return (yield from value(source, out.arguments))
    heard: list[str] = []
    whole = yield from value(source, heard.append)
    out.arguments(_plain("".join(heard)))
    return whole


def call_list(source: Source, out: PartList, *, bare: bool = False) -> Steps[bool]:
    """Calls between brackets; False: there is none."""
    source.keep()
    place = yield from blanks(source)
    found = False
    if place != "[":
        return _none(source)
    while place in ("[", ","):
        source.at += 1
        if (yield from blanks(source)) == "]":
            source.at += 1
            break
        if not (yield from call_object(source, out, bare=bare)):
            return found or _none(source)
        found = True
        place = yield from blanks(source)
        if place == "]":
            source.at += 1
    return found or _none(source)


def calls(source: Source, out: PartList, *, bare: bool = False) -> Steps[bool]:
    """One call or a list of them; False: there is none, and nothing was said."""
    if (yield from after_blanks(source)) == "[":
        return (yield from call_list(source, out, bare=bare))
    return (yield from call_object(source, out, bare=bare))


def _key(source: Source) -> Steps[str | None]:
    key = yield from string(source)
    if key is None or (yield from blanks(source)) != ":":
        return None
    source.at += 1
    yield from blanks(source)
    return key


def _rest(source: Source) -> Steps[None]:
    """Skip what follows the arguments in their object."""
    while (yield from blanks(source)) == ",":
        source.at += 1
        yield from blanks(source)
        if (yield from _key(source)) is None or not (yield from value(source, _unheard)):
            return
    if (yield from blanks(source)) == "}":
        source.at += 1


def _unheard(text: str) -> None:
    """Nobody needs it."""


def _plain(held: str) -> str:
    if held.startswith('"'):
        try:
            return msgspec.json.decode(held, type=str) or "{}"
        except msgspec.DecodeError:
            return held
    return "{}" if held in ("", "null") else held


def _none(source: Source) -> bool:
    source.back()
    return False
