"""Grammars that make a model call its tools, in its own format.

In llguidance's form of Lark: a tool's arguments are `%json` with its schema, each in a rule of its
own, so that `$ref` keeps its root. Where blanks may stand is fixed: a weak model would write them
for ever.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import msgspec

from diptych_contracts.answer_formats import AnswerFormat, Tool
from diptych_text.formats import CALL_FORMATS, THOUGHT_FORMATS, CallFormat

MAX_CALLS = 8
"""Most calls of one forced answer: without a limit a weak model calls for ever."""
_NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'

_THOUGHTS = {m for thought in THOUGHT_FORMATS.values() if thought for m in astuple(thought)}
"""Markers of reasoning: free text may hold them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the model must call."""

    tools: Sequence[Tool]
    """One of these."""
    most: int = MAX_CALLS


def forced_format(name: str) -> str:
    """The format that a forced call is written in, for a model that speaks `name`."""
    return CALL_FORMATS[name].forced_as or name


def forcing_grammar(
    made: AnswerFormat,
    choice: Choice | None,
    control_ids: Mapping[str, int],
    *,
    document: str = "",
) -> str:
    """The grammar of an answer in format `made` that calls, or is a document, and says no more.

    Args:
        made: Its `tools` is one of `forced_format`; where `begun`, reasoning goes on first.
        choice: What may be called, and how often; None: nothing.
        control_ids: The model's control tokens among the format's markers.
        document: A JSON schema of what it may be instead.
    """
    spell = _Speller(control_ids)
    kinds = [name for name, there in (("calls", choice), ("document", document)) if there]
    start = f"start: {'thought ' if _thinks(made) else ''}({' | '.join(kinds)})"
    rules = [start, *_thought(made, spell)]
    if document:
        rules.append(f"document: %json {_compact(msgspec.json.decode(document), lenient=False)}")
    if choice is not None:
        written = CALL_FORMATS[made.tools]
        more = f" (between call){{0,{choice.most - 1}}}" if choice.most > 1 else ""
        rules.append(f"calls: {spell(written.opening)} call{more} {spell(written.closing)}")
        rules += [f"between: {spell(written.between)}"] if more else []
        rules += _calls(choice.tools, written, spell)
    return "\n".join((*rules, ""))


def guarding_grammar(
    made: AnswerFormat, tools: Sequence[Tool], control_ids: Mapping[str, int]
) -> str | None:
    """The grammar of an answer in which every call fits its tool's schema, and text is free.

    None: the format does not mark where a call begins.
    """
    written = CALL_FORMATS[made.tools]
    if not written.opening:
        return None
    spell = _Speller(control_ids)
    block = f"{spell(written.opening)} call (between call)* {spell(written.closing)}"
    rules = [
        f"start: {'thought ' if _thinks(made) else ''}prose ({block} prose)*",
        *_thought(made, spell),
        f"between: {spell(written.between)}",
        *_free("prose", written.markers[0], spell),
    ]
    return "\n".join((*rules, *_calls(tools, written, spell), ""))


def _calls(tools: Sequence[Tool], written: CallFormat, spell: "_Speller") -> Iterator[str]:
    yield f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{written.arguments}": '
        yield f"call_{number}: {spell(head)} arguments_{number} {spell('}')}"
        yield f"arguments_{number}: %json {_schema(tool)}"


def _thinks(made: AnswerFormat) -> bool:
    return made.begun and THOUGHT_FORMATS.get(made.reasoning) is not None


def _thought(made: AnswerFormat, spell: "_Speller") -> Iterator[str]:
    """Reasoning that the prompt began, up to its end."""
    thought = THOUGHT_FORMATS.get(made.reasoning)
    if made.begun and thought is not None:
        yield f"thought: thinking {spell(thought.closing)} {spell(chr(10) * 2)}"
        yield from _free("thinking", thought.closing, spell)


def _free(rule: str, end: str, spell: "_Speller") -> Iterator[str]:
    """Any text without `end`."""
    terminal = rule.upper()
    others = [
        f"<[{token}]>" for text, token in spell.control_ids.items() if text in _THOUGHTS - {end}
    ]
    yield f"{rule}: ({' | '.join((terminal, *others))})*" if others else f"{rule}: {terminal}"
    if end in spell.control_ids:
        yield f"{terminal}: /(?s:.*)/"
    else:
        inside = re.escape(end).replace("/", r"\/")
        yield f"{terminal}: /(?s:.*)/ & ~/(?s:.*){inside}(?s:.*)/"


def _schema(tool: Tool) -> str:
    return _compact(msgspec.json.decode(tool.parameters or _NO_ARGUMENTS), lenient=not tool.strict)


def _compact(schema: Any, *, lenient: bool) -> str:
    """`schema` with word of how its JSON is written: as `grammars` has it."""
    if isinstance(schema, dict):
        written = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        schema = {**schema, "x-guidance": {**written, "lenient": lenient}}
    return json.dumps(schema, ensure_ascii=False)


class _Speller:
    """Writes text as a grammar says it: control tokens by their number, the rest in quotes."""

    def __init__(self, control_ids: Mapping[str, int]) -> None:
        self.control_ids = control_ids
        known = "|".join(map(re.escape, sorted(control_ids, key=len, reverse=True)))
        self._cut = re.compile(f"({known})") if known else None

    def __call__(self, text: str) -> str:
        pieces = self._cut.split(text) if self._cut is not None else [text]
        return " ".join(
            f"<[{self.control_ids[piece]}]>" if piece in self.control_ids else _quoted(piece)
            for piece in pieces
            if piece
        )


def _quoted(text: str) -> str:
    return json.dumps(text)
