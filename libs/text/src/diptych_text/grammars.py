"""Grammars in llguidance's words: how JSON is written, and what matching may cost.

Gateway and workers say the same of a grammar, for both ask here. JSON is written in one way, with a
space behind `,` and `:` and no other: small models are fond of endless blanks, and every place
where they may choose one costs them thought and us tokens.
"""

import re
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_text.panics import panic_as
from diptych_text.subschemas import subschemas

MAX_GRAMMAR_BYTES = 64 * 1024
"""Of its text. The largest of a hundred public kinds of schema has 700."""
_MAX_SAID_CHARS = 1000
"""Of what is wrong: it may quote a pattern of any length, and say at the end why that is none."""
_EXCERPT = re.compile(r"\n +\d+ \| ")
"""Where a Lark error begins to quote the grammar, which nobody but us has written."""
_YEAR = "^(0{0,3}[1-9])"
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
_TIGHTER = {"date": _YEAR, "time": f"^{_SECOND}", "date-time": f"{_YEAR}[0-9-]*[Tt]{_SECOND}"}
"""Patterns that dates and times must match beside their format."""


def matching_limits() -> LLParserLimits:
    """What one grammar may cost, by count and so alike everywhere.

    About 20 ms to set up, 7 ms and 50,000 items per token (twenty times what a hundred public
    kinds of schema need), and 20 MB of states.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def spelled(grammar: Grammar) -> str:
    """`grammar` as llguidance takes it.

    Raises:
        InvalidRequest: it is too long, or no JSON object.
    """
    if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"expected at most {MAX_GRAMMAR_BYTES} bytes, saw {size}")
    match grammar.kind:
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "json_schema":
            return _of_schema(grammar.text)


def check_grammar(grammar: Grammar) -> None:
    """See that `grammar` can be obeyed; some 0.3 ms, 20 ms at worst.

    Raises:
        InvalidRequest: says what is wrong with it.
    """
    with panic_as(InvalidRequest):
        broken, messages = LLMatcher.validate_grammar_with_warnings(
            spelled(grammar), limits=matching_limits()
        )
    if broken:
        raise InvalidRequest(_said(messages[0]))


def _of_schema(text: str) -> str:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as err:
        raise InvalidRequest(f"expected JSON: {err}") from err
    if not isinstance(schema, dict):
        raise InvalidRequest(f"expected a JSON object, saw {type(schema).__name__}")
    if '"format"' in text:
        text = msgspec.json.encode(_tightened(schema)).decode()
    try:
        return LLMatcher.grammar_from_json_schema(
            text,
            overrides={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
                "lenient": False,
            },
        )
    except ValueError as err:
        raise InvalidRequest(str(err).strip()) from err


def _tightened(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` without the year 0 and leap seconds: no clock and few readers know them."""
    for _, part in subschemas(schema, "schema"):
        pattern = _TIGHTER.get(str(part.get("format")))
        if pattern is not None and "pattern" not in part:
            part["pattern"] = pattern
    return schema


def _said(message: str) -> str:
    if message.startswith("oneOf constraints are not supported"):
        return "oneOf: expected alternatives that exclude one another, else say anyOf"
    message = _EXCERPT.split(message, maxsplit=1)[0].strip()
    if len(message) > _MAX_SAID_CHARS:
        message = f"{message[: _MAX_SAID_CHARS // 2]} … {message[-_MAX_SAID_CHARS // 2 :]}"
    return message
