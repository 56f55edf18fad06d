import json
import re

import llguidance
import pytest

from diptych_contracts.answer_formats import AnswerFormat, Tool
from diptych_text.forcing import Choice, forced_format, forcing_grammar, guarding_grammar
from diptych_text.formats import CALL_FORMATS

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer"}},
}
TOOLS = [
    Tool(name="weather", parameters=json.dumps(SCHEMA), strict=True),
    Tool(name="clock", description='The "time"'),
]
CONTROL = {"<tool_call>": 3, "<|tool_call|>": 4, "[TOOL_CALLS]": 5, "<think>": 6, "</think>": 7}


def fault(grammar: str) -> str:
    return str(llguidance.LLMatcher.validate_grammar(grammar))


@pytest.mark.parametrize("control_ids", [{}, CONTROL], ids=["text", "control"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_llguidance_takes_every_grammar(
    name: str, begun: bool, control_ids: dict[str, int]
) -> None:
    made = AnswerFormat(tools=forced_format(name), reasoning="think", begun=begun)
    for choice in (Choice(TOOLS, 1), Choice(TOOLS)):
        for document in ("", json.dumps(SCHEMA)):
            grammar = forcing_grammar(made, choice, control_ids, document=document)
            assert fault(grammar) == ""
    assert fault(forcing_grammar(made, None, control_ids, document=json.dumps(SCHEMA))) == ""
    guarding = guarding_grammar(AnswerFormat(tools=name, begun=begun), TOOLS, control_ids)
    assert guarding is None or fault(guarding) == ""


def test_control_tokens_are_said_by_number() -> None:
    text = forcing_grammar(AnswerFormat(tools="hermes"), Choice(TOOLS, 1), CONTROL)
    assert 'calls: <[3]> "\\n" call "\\n</tool_call>"' in text
    assert "call: call_0 | call_1" in text


def test_a_tool_without_parameters_is_called_with_none() -> None:
    text = forcing_grammar(AnswerFormat(tools="json"), Choice(TOOLS[1:], 1), {})
    (schema,) = re.findall(r"^arguments_0: %json (.*)$", text, re.MULTILINE)
    assert json.loads(schema)["additionalProperties"] is False


def test_formats_without_an_opening_cannot_be_guarded() -> None:
    assert guarding_grammar(AnswerFormat(tools="pythonic"), TOOLS, {}) is None
