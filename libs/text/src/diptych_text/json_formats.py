"""Calls as JSON between markers: most families, each with markers of its own."""

from collections.abc import Callable

from diptych_text.call_objects import MAX_NAME_CHARS, arguments, calls
from diptych_text.parts import PartList
from diptych_text.scanning import (
    Markers,
    Source,
    Steps,
    after_blanks,
    blanks,
    captured,
    literal,
    look,
    until,
)

Parser = Callable[[Source, PartList], Steps[None]]

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BAR = "\uff5c"
"""DeepSeek's wide bar; its words are joined by lower blocks."""
CALL_BEGIN, CALL_END = f"<{_BAR}tool▁call▁begin{_BAR}>", f"<{_BAR}tool▁call▁end{_BAR}>"
CALLS_BEGIN, CALLS_END = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
CALL_SEP = f"<{_BAR}tool▁sep{_BAR}>"


def prose(source: Source, out: PartList) -> Steps[None]:
    """Text and nothing else."""
    while True:
        out.text(source.text[source.at :])
        source.at = len(source.text)
        if not (yield from source.more()):
            return


def tagged(opening: str, closing: str) -> Parser:
    """Calls between `opening` and `closing`: each an object, or several in a list."""
    markers = Markers(opening)

    def parse(source: Source, out: PartList) -> Steps[None]:
        while (yield from until(source, markers, out.text)):
            source.at += len(opening)
            if not (yield from calls(source, out)):
                out.text(opening)
                continue
            out.edge()
            while (yield from blanks(source)) in ("{", "["):
                if not (yield from calls(source, out)):
                    break
            yield from literal(source, closing)

    return parse


def bare(source: Source, out: PartList) -> Steps[None]:
    """Calls as the answer's first word, or behind `<|python_tag|>`, `;` or `,` between."""
    source.keep()
    if (yield from blanks(source)) in ("{", "["):
        if not (yield from _bare_calls(source, out)):
            source.back()
    else:
        source.back()
    markers = Markers(PYTHON_TAG)
    source.release()
    while (yield from until(source, markers, out.text)):
        source.at += len(PYTHON_TAG)
        if not (yield from _bare_calls(source, out)):
            out.text(PYTHON_TAG)


def _bare_calls(source: Source, out: PartList) -> Steps[bool]:
    if not (yield from calls(source, out, bare=True)):
        return False
    out.edge()
    while (separator := (yield from blanks(source))) in (";", ",", "{"):
        source.keep()
        source.at += separator != "{"
        if not (yield from calls(source, out, bare=True)):
            source.back()
            break
        out.edge()
    return True


def mistral(source: Source, out: PartList) -> Steps[None]:
    """`[TOOL_CALLS]` before a list of calls, or before a name, `[ARGS]` and the arguments."""
    markers, ends = Markers(TOOL_CALLS), Markers(ARGS, CALL_ID, "{", TOOL_CALLS)
    while (yield from until(source, markers, out.text)):
        source.at += len(TOOL_CALLS)
        if (yield from after_blanks(source)) in ("[", "{"):
            if not (yield from calls(source, out)):
                out.text(TOOL_CALLS)
            continue
        source.keep()
        name, marker = yield from captured(source, ends)
        while marker == CALL_ID:
            source.at += len(CALL_ID)
            _, marker = yield from captured(source, ends)
        if marker not in (ARGS, "{") or not 0 < len(name.strip()) <= MAX_NAME_CHARS:
            source.back()
            out.text(TOOL_CALLS)
            continue
        source.at += len(ARGS) if marker == ARGS else 0
        source.release()
        out.call(name.strip())
        yield from arguments(source, out)
        out.edge()


def deepseek(source: Source, out: PartList) -> Steps[None]:
    """Between markers a name and its arguments; R1 and V3 write `function`, and a fence."""
    markers = Markers(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END)
    while marker := (yield from until(source, markers, out.text)):
        source.at += len(marker)
        out.edge()
        if marker != CALL_BEGIN:
            continue
        source.keep()
        head, found = yield from captured(source, Markers(CALL_SEP, CALL_END))
        if found != CALL_SEP:
            source.back()
            out.text(CALL_BEGIN)
            continue
        source.at += len(CALL_SEP)
        name = head.strip()
        if name == "function" and (yield from look(source)) != "{":
            line, _ = yield from captured(source, Markers("\n"))
            name = line.strip()
            yield from blanks(source)
            yield from literal(source, "```json")
        source.release()
        out.call(name)
        yield from arguments(source, out)
        out.edge()
        yield from blanks(source)
        yield from literal(source, "```")
        yield from blanks(source)
