"""A parameter that the model's engine cannot obey is refused by name; its default is not."""

from typing import Any

import msgspec
import pytest

from diptych_contracts.cards import PARAMETERS, ModelCard
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_gateway.judging.bodies import decode
from diptych_gateway.judging.checking import check
from diptych_gateway.judging.supported import _ASKED, _SAMPLED, check_plan, check_supported
from diptych_testkit.tiny_gguf import tiny_card

SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TABLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("temperature", {"temperature": 0.5}, {"temperature": 1.0}),
    ("top_p", {"top_p": 0.5}, {"top_p": 1.0}),
    ("top_k", {"top_k": 5}, {"top_k": 0}),
    ("min_p", {"min_p": 0.1}, {"min_p": 0.0}),
    ("seed", {"seed": 7}, {}),
    ("logit_bias", {"logit_bias": {"5": 1.0}}, {"logit_bias": {}}),
    ("logprobs", {"logprobs": True}, {"logprobs": False}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 2}, {"logprobs": True}),
    ("presence_penalty", {"presence_penalty": 1.0}, {"presence_penalty": 0.0}),
    ("frequency_penalty", {"frequency_penalty": 1.0}, {"frequency_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": 1.1}, {"repetition_penalty": 1.0}),
    ("stop", {"stop": "x"}, {"stop": []}),
    ("ignore_eos", {"ignore_eos": True}, {"ignore_eos": False}),
    ("response_format", {"response_format": SCHEMA}, {"response_format": {"type": "text"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}, {"tools": [TOOL]}),
]


def card(*unsupported: str) -> ModelCard:
    return msgspec.structs.replace(tiny_card(model="m"), unsupported=unsupported)


def judge(body: dict[str, Any], *unsupported: str) -> None:
    whole = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    check_supported(check(decode(msgspec.json.encode(whole))), card(*unsupported))


@pytest.mark.parametrize(("name", "asking", "harmless"), TABLE, ids=[row[0] for row in TABLE])
def test_each_parameter_is_refused_by_name(
    name: str, asking: dict[str, Any], harmless: dict[str, Any]
) -> None:
    judge(asking, *(other for other in PARAMETERS if other not in (name, "logprobs")))
    judge(harmless, name)
    with pytest.raises(InvalidRequest, match=f"'{name}'.*'m' does not support it") as caught:
        judge(asking, name)
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_the_table_is_whole() -> None:
    assert [row[0] for row in TABLE] == sorted(PARAMETERS, key=[row[0] for row in TABLE].index)
    assert {*_SAMPLED, *_ASKED} == set(PARAMETERS)


def test_a_grammar_made_of_tools_is_none_of_response_format() -> None:
    lark, schema = Grammar(kind="lark", text="start: /a/"), Grammar(kind="json_schema", text="{}")
    check_plan(schema, card("tool_choice"), param="tools")
    check_plan(lark, card("response_format"), param="tools")
    with pytest.raises(InvalidRequest, match="'tools'"):
        check_plan(lark, card("tool_choice"), param="tools")
