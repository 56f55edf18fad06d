import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_contracts.answer_formats import AnswerFormat
from diptych_text.formats import CALL_FORMATS, THOUGHT_FORMATS
from diptych_text.parsing import AnswerParser
from diptych_text.parts import CallArguments, CallBegun, Part, Reasoning, Text

ANSWERS = sorted((Path(__file__).parent / "answers").glob("*.json"))
KINDS = {"text": Text, "reasoning": Reasoning, "call": CallBegun, "arguments": CallArguments}


def golden(path: Path) -> tuple[AnswerFormat, str, list[Part]]:
    """A raw answer, as its model family writes it, and its parts."""
    said = json.loads(path.read_text(encoding="utf-8"))
    made = msgspec.convert(said["format"] | {"type": "answer_format.1"}, AnswerFormat)
    return made, said["raw"], [KINDS[kind](*values) for kind, *values in said["parts"]]


def parts_of(made: AnswerFormat, *pieces: str) -> list[Part]:
    parser = AnswerParser(made)
    found = [part for piece in pieces for part in parser.push(piece)]
    return joined([*found, *parser.finish()])


def joined(parts: list[Part]) -> list[Part]:
    made: list[Any] = []
    for part in parts:
        last = made[-1] if made else None
        if type(last) is type(part) and not isinstance(part, CallBegun) and last[:-1] == part[:-1]:
            made[-1] = part._replace(text=last.text + part.text)
        else:
            made.append(part)
    return made


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_an_answer_has_the_same_parts_however_it_is_cut(path: Path) -> None:
    made, raw, parts = golden(path)
    assert parts_of(made, raw) == parts
    assert parts_of(made, *raw) == parts
    for place in range(1, len(raw)):
        assert parts_of(made, raw[:place], raw[place:]) == parts


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_an_answer_that_breaks_off_anywhere_keeps_what_it_said(path: Path) -> None:
    made, raw, _ = golden(path)
    for place in range(len(raw)):
        assert parts_of(made, *raw[:place]) == parts_of(made, raw[:place])


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_calls_of_an_answer_that_is_whole_are_json(path: Path) -> None:
    _, _, parts = golden(path)
    if path.stem != "cut-off":
        for part in parts:
            assert not isinstance(part, CallArguments) or isinstance(json.loads(part.text), dict)


def test_every_format_has_a_golden_answer() -> None:
    formats = [golden(path)[0] for path in ANSWERS]
    assert {made.tools for made in formats} - {""} == set(CALL_FORMATS)
    assert {made.reasoning for made in formats} - {""} == set(THOUGHT_FORMATS)


def test_arguments_are_said_as_they_come() -> None:
    parser = AnswerParser(AnswerFormat(tools="hermes"))
    assert parser.push('<tool_call>\n{"name": "weather", "arguments":') == []
    assert parser.push(' {"city": "Pa') == [
        CallBegun(0, "weather"),
        CallArguments(0, '{"city": "Pa'),
    ]
    assert parser.push('ris"}') == [CallArguments(0, 'ris"}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.calls == 1


def test_a_string_parameter_of_the_xml_format_is_said_as_it_comes() -> None:
    parser = AnswerParser(AnswerFormat(tools="qwen3_coder", texts=("weather.city",)))
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert parser.push('Pa"r') == [CallArguments(0, 'Pa\\"r')]
    assert parser.push("is\n</para") == [CallArguments(0, "is")]
    assert parser.push("meter>\n</function>\n</tool_call>") == [CallArguments(0, '"}')]


def test_text_waits_only_for_what_may_be_a_marker() -> None:
    parser = AnswerParser(AnswerFormat(tools="hermes"))
    assert parser.push("Hello") == [Text("Hello")]
    assert parser.push(" a <too") == [Text(" a")]
    assert parser.push("th") == [Text(" <tooth")]
    assert parser.finish() == []


def test_pieces_of_reasoning_are_counted() -> None:
    parser = AnswerParser(AnswerFormat(tools="hermes", reasoning="think"))
    for piece in ("<think>", "\n", "I", " see", "</think>", "\n\n", "Yes", "."):
        parser.push(piece)
    assert parser.thoughts == 3


def test_without_reasoning_a_thinking_model_answers_at_once() -> None:
    made = AnswerFormat(reasoning="think")
    assert parts_of(made, "<thin", "g> is no tag") == [Text("<thing> is no tag")]
    assert parts_of(made, "  ") == [Text("  ")]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_brackets_without_end_are_no_harm(name: str) -> None:
    opening, brackets = "".join(CALL_FORMATS[name].markers[:1]), "[" * 20_000
    text = opening + '{"name": "f", "arguments": ' + brackets
    made = AnswerFormat(tools=name)
    parts = parts_of(made, *(text[start : start + 997] for start in range(0, len(text), 997)))
    assert parts == parts_of(made, text)
    assert parts[-1].text.endswith(brackets)
    assert len(parts) == 1 or parts == [CallBegun(0, "f"), CallArguments(0, brackets)]
