"""Calls in Qwen3-Coder's tags: `<function=name><parameter=key>` value `</parameter></function>`.

A value is written as it is, so only a tool's schema tells whether `3` is a number: parameters of
type string (`texts`: `function.parameter`) stay text and stream; others are JSON where they can be.
"""

import json
from collections.abc import Callable, Collection

import msgspec

from diptych_text.call_objects import MAX_NAME_CHARS
from diptych_text.parts import PartList
from diptych_text.scanning import Markers, Source, Steps, blanks, captured, literal, until

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def xml(texts: Collection[str]) -> Callable[[Source, PartList], Steps[None]]:
    """The parser, for tools whose parameters of type string are `texts`."""
    markers, tag_end = Markers(OPEN, FUNCTION), Markers(">", "<")

    def parse(source: Source, out: PartList) -> Steps[None]:
        while marker := (yield from until(source, markers, out.text)):
            source.at += len(marker)
            source.keep()
            if marker == OPEN:
                yield from blanks(source)
            if marker == OPEN and not (yield from literal(source, FUNCTION)):
                source.back()
                out.text(marker)
                continue
            name, found = yield from captured(source, tag_end)
            if found != ">" or not 0 < len(name.strip()) <= MAX_NAME_CHARS:
                source.back()
                out.text(marker)
                continue
            source.at += 1
            source.release()
            out.call(name.strip())
            known = {
                text[len(name.strip()) + 1 :]
                for text in texts
                if text.startswith(f"{name.strip()}.")
            }
            yield from _parameters(source, out, known)
            out.edge()
            yield from blanks(source)
            yield from literal(source, CLOSE)

    return parse


def _parameters(source: Source, out: PartList, texts: Collection[str]) -> Steps[None]:
    said = 0
    ends = Markers(PARAMETER, FUNCTION_END, CLOSE)
    while marker := (yield from until(source, ends, _unheard)):
        if marker != PARAMETER:
            source.at += len(marker) if marker == FUNCTION_END else 0
            out.arguments("}" if said else "{}")
            return
        source.at += len(PARAMETER)
        key, found = yield from captured(source, Markers(">"))
        if not found:
            return
        source.at += 1
        opening = f"{', ' if said else '{'}{json.dumps(key.strip(), ensure_ascii=False)}: "
        said += 1
        if not (yield from _value(source, out, opening, text=key.strip() in texts)):
            return


def _value(source: Source, out: PartList, opening: str, *, text: bool) -> Steps[bool]:
    """Say a parameter; False: it breaks off."""
    end = Markers(f"\n{PARAMETER_END}", PARAMETER_END)
    yield from literal(source, "\n")
    if text:
        out.arguments(f'{opening}"')
        marker = yield from until(source, end, lambda part: out.arguments(_inside(part)))
        out.arguments('"' if marker else "")
    else:
        heard, marker = yield from captured(source, end)
        out.arguments(opening + _as_json(heard) if marker else "")
    source.at += len(marker)
    return bool(marker)


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _unheard(text: str) -> None:
    """Between two parameters nothing counts."""
