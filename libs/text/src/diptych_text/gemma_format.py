"""FunctionGemma's calls: `call:name{key:<escape>text<escape>,other:3}` between two markers.

Its values become JSON one call at a time: they nest, and are short.
"""

import json
import re

from diptych_text.call_objects import MAX_NAME_CHARS
from diptych_text.parts import PartList
from diptych_text.scanning import Markers, Source, Steps, blanks, captured, literal, until

OPEN, CLOSE, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_TOKEN = re.compile(
    rf"\s*(?:{ESCAPE}(?P<text>.*?){ESCAPE}|(?P<mark>[{{}}\[\]:,])|(?P<word>[^{{}}\[\]:,<\s]+))",
    re.DOTALL,
)
_WORD = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null")


def function_gemma(source: Source, out: PartList) -> Steps[None]:
    """Calls between the two markers."""
    opening = Markers(OPEN)
    while (yield from until(source, opening, out.text)):
        source.at += len(OPEN)
        source.keep()
        yield from blanks(source)
        known = yield from literal(source, "call:")
        name, found = yield from captured(source, Markers("{", CLOSE))
        if not known or found != "{" or not 0 < len(name.strip()) <= MAX_NAME_CHARS:
            source.back()
            out.text(OPEN)
            continue
        source.release()
        out.call(name.strip())
        body, end = yield from captured(source, Markers(CLOSE))
        out.arguments(_as_json(body) if end else "")
        source.at += len(end)
        out.edge()


def _as_json(body: str) -> str:
    """The arguments as JSON; as they stand if they are none."""
    found = list(_TOKEN.finditer(body))
    if "".join(match[0] for match in found) != body.rstrip():
        return body
    pieces: list[str] = []
    for place, match in enumerate(found):
        if match["mark"]:
            pieces.append(match["mark"])
        elif match["text"] is not None:
            pieces.append(json.dumps(match["text"], ensure_ascii=False))
        else:
            word = match["word"]
            is_key = place + 1 < len(found) and found[place + 1]["mark"] == ":"
            plain = not is_key and _WORD.fullmatch(word)
            pieces.append(word if plain else json.dumps(word, ensure_ascii=False))
    text = "".join(pieces)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return body
    return text
