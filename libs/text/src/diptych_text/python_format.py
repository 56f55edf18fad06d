"""Calls as Python writes them: `[weather(city="Paris"), time()]`."""

import ast
import json
import re

from diptych_text.call_objects import MAX_NAME_CHARS
from diptych_text.parts import PartList
from diptych_text.scanning import Markers, Source, Steps, blanks, look, until

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_WORD = re.compile(r"[\w.\-]")
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_JSON_WORDS = {"true": True, "false": False, "null": None}


def pythonic(source: Source, out: PartList) -> Steps[None]:
    """A list of calls as the answer's first word, or between markers."""
    source.keep()
    if (yield from blanks(source)) != "[" or not (yield from _calls(source, out)):
        source.back()
    source.release()
    markers = Markers(START, END)
    while marker := (yield from until(source, markers, out.text)):
        source.at += len(marker)
        out.edge()
        if marker == START and not (yield from _calls(source, out)):
            out.text(START)


def _calls(source: Source, out: PartList) -> Steps[bool]:
    """A list of calls; False: there is none, and nothing was said."""
    source.keep()
    found = False
    if (yield from blanks(source)) == "[":
        source.at += 1
        while (yield from _call(source, out)):
            found = True
            if (yield from blanks(source)) != ",":
                break
            source.at += 1
        if found and (yield from blanks(source)) == "]":
            source.at += 1
    if not found:
        source.back()
        return False
    out.edge()
    return True


def _call(source: Source, out: PartList) -> Steps[bool]:
    source.keep()
    yield from blanks(source)
    name = yield from _word(source)
    if not _NAME.fullmatch(name) or (yield from look(source)) != "(":
        source.back()
        return False
    source.release()
    source.at += 1
    out.call(name)
    said = 0
    while (yield from blanks(source)) not in (")", ""):
        key = yield from _word(source)
        if not key or (yield from blanks(source)) != "=":
            break
        source.at += 1
        literal, whole = yield from _literal(source)
        if not whole:  # broken off: a value that is half there is none
            return True
        out.arguments(f"{', ' if said else '{'}{json.dumps(key)}: {_as_json(literal)}")
        said += 1
        if (yield from blanks(source)) == ",":
            source.at += 1
    if (yield from look(source)) == ")":
        source.at += 1
        out.arguments("}" if said else "{}")
    return True


def _word(source: Source) -> Steps[str]:
    word = ""
    while (char := (yield from look(source))) and _WORD.match(char) and len(word) < MAX_NAME_CHARS:
        word += char
        source.at += 1
    return word


def _literal(source: Source) -> Steps[tuple[str, bool]]:
    """A value up to its comma or bracket, and whether that came."""
    heard: list[str] = []
    closers: list[str] = []
    quote = ""
    while char := (yield from look(source)):
        if quote:
            quote = "" if char == quote else quote
            if char == "\\":
                source.at += 1
                heard.append(char)
                char = yield from look(source)
        elif char in "\"'":
            quote = char
        elif char in _CLOSER:
            closers.append(_CLOSER[char])
        elif closers and char == closers[-1]:
            closers.pop()
        elif not closers and char in ",)":
            return "".join(heard), True
        heard.append(char)
        source.at += 1
    return "".join(heard), False


def _as_json(literal: str) -> str:
    """A Python value as JSON; what is none becomes a string."""
    text = literal.strip()
    if text in _JSON_WORDS:
        return json.dumps(_JSON_WORDS[text])
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)
