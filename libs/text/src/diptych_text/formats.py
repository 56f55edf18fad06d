"""How model families write calls and reasoning, by name; and which a chat template speaks."""

from collections.abc import Callable
from dataclasses import dataclass

from diptych_contracts.answer_formats import AnswerFormat
from diptych_text import gemma_format, harmony, json_formats, python_format, thinking, xml_format
from diptych_text.json_formats import Parser


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls."""

    parser: Callable[[AnswerFormat], Parser]
    markers: tuple[str, ...]
    """What its parser needs to see, even where it is a control token."""
    opening: str = ""
    """What stands before a call that is forced…"""
    between: str = ""
    closing: str = ""
    arguments: str = "arguments"
    """… and what its arguments are called; see `forcing`."""
    forced_as: str = ""
    """The format a forced call is written in, if not this one."""


def _tagged(opening: str, closing: str, *, opens_list: bool = False) -> CallFormat:
    parser = json_formats.tagged(opening, closing)
    markers = (opening, closing) if closing else (opening,)
    lists = {"opening": f"{opening}[", "between": ", ", "closing": f"]{closing}"}
    block = (f"{opening}\n", f"\n{closing}")
    blocks = {"opening": block[0], "between": f"{block[1]}\n{block[0]}", "closing": block[1]}
    return CallFormat(lambda _: parser, markers, **(lists if opens_list else blocks))


GENERIC = "hermes"
"""For models whose template knows no tools: they are told in words to write calls so."""
JSON = "json"
"""A call is the whole answer."""

CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": _tagged("<tool_call>", "</tool_call>"),
    "granite": _tagged("<|tool_call|>", "", opens_list=True),
    "phi": _tagged("<|tool_call|>", "<|/tool_call|>", opens_list=True),
    "json": CallFormat(lambda _: json_formats.bare, (json_formats.PYTHON_TAG,), between="; "),
    "llama3": CallFormat(
        lambda _: json_formats.bare,
        (json_formats.PYTHON_TAG,),
        between="; ",
        arguments="parameters",
    ),
    "pythonic": CallFormat(
        lambda _: python_format.pythonic, (python_format.START, python_format.END), forced_as=JSON
    ),
    "mistral": CallFormat(
        lambda _: json_formats.mistral,
        (json_formats.TOOL_CALLS, json_formats.ARGS, json_formats.CALL_ID),
        opening=f"{json_formats.TOOL_CALLS}[",
        between=", ",
        closing="]",
    ),
    "deepseek": CallFormat(
        lambda _: json_formats.deepseek,
        (
            json_formats.CALLS_BEGIN,
            json_formats.CALLS_END,
            json_formats.CALL_BEGIN,
            json_formats.CALL_SEP,
            json_formats.CALL_END,
        ),
        forced_as=JSON,
    ),
    "qwen3_coder": CallFormat(
        lambda made: xml_format.xml(made.texts),
        (xml_format.OPEN, xml_format.CLOSE, xml_format.FUNCTION_END, xml_format.PARAMETER_END),
        forced_as=JSON,
    ),
    "functiongemma": CallFormat(
        lambda _: gemma_format.function_gemma,
        (gemma_format.OPEN, gemma_format.CLOSE, gemma_format.ESCAPE),
        forced_as=JSON,
    ),
    "harmony": CallFormat(lambda _: harmony.harmony, harmony.MARKERS, forced_as=JSON),
}


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """One way to mark reasoning."""

    opening: str
    closing: str


NO_FORMAT = "none"
"""A card says so of a model that has none, whatever its template holds."""
HARMONY = "harmony"
THOUGHT_FORMATS: dict[str, ThoughtFormat | None] = {
    "think": ThoughtFormat(thinking.THINK, thinking.THINK_END),
    "bracket": ThoughtFormat(thinking.BRACKET, thinking.BRACKET_END),
    HARMONY: None,
}


@dataclass(frozen=True, slots=True)
class Family:
    """What a chat template speaks; empty names: neither calls nor reasoning."""

    tools: str = ""
    reasoning: str = ""


_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", (harmony.CHANNEL, harmony.MESSAGE)),
    ("deepseek", (json_formats.CALL_BEGIN,)),
    ("mistral", (json_formats.TOOL_CALLS,)),
    ("functiongemma", (gemma_format.OPEN,)),
    ("qwen3_coder", (xml_format.FUNCTION, xml_format.PARAMETER)),
    ("phi", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", (python_format.START,)),
    ("pythonic", ("[func_name1(",)),
    ("llama3", (json_formats.PYTHON_TAG,)),
    ("llama3", ('"parameters":', "<|start_header_id|>")),
)
_THOUGHT_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, (harmony.CHANNEL, harmony.MESSAGE)),
    ("think", (thinking.THINK_END,)),
    ("bracket", (thinking.BRACKET_END,)),
)


def family_of(template: str) -> Family:
    """What a chat template's own markers say its model speaks."""
    return Family(_first(_TOOL_SIGNS, template), _first(_THOUGHT_SIGNS, template))


def _first(signs: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    return next((name for name, all_ in signs if all(sign in template for sign in all_)), "")


def markers_of(made: AnswerFormat) -> tuple[str, ...]:
    """The texts that the parser of `made` must be given even where they are control tokens."""
    found: list[str] = []
    if made.tools:
        found += CALL_FORMATS[made.tools].markers
    if made.reasoning == HARMONY:
        found += harmony.MARKERS
    elif thought := THOUGHT_FORMATS.get(made.reasoning):
        found += (thought.opening, thought.closing)
    return tuple(dict.fromkeys(found))


def parser_of(made: AnswerFormat) -> Parser:
    """The parser of answers in this format."""
    then = CALL_FORMATS[made.tools].parser(made) if made.tools else json_formats.prose
    if made.reasoning == HARMONY:
        return harmony.harmony if made.tools in ("", HARMONY) else then
    thought = THOUGHT_FORMATS.get(made.reasoning)
    if thought is None:
        return then
    return thinking.thinking(thought.opening, thought.closing, begun=made.begun, then=then)


def check_names(*, tools: str = "", reasoning: str = "") -> None:
    """Raise `ValueError` for a format that is none."""
    if tools not in ("", NO_FORMAT, *CALL_FORMATS):
        raise ValueError(f"tool format: expected one of {', '.join(CALL_FORMATS)}, saw {tools!r}")
    if reasoning not in ("", NO_FORMAT, *THOUGHT_FORMATS):
        known = ", ".join(THOUGHT_FORMATS)
        raise ValueError(f"reasoning format: expected one of {known}, saw {reasoning!r}")
