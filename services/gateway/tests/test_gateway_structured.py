"""Structured output: what is asked for, what is refused by name, and what the engine is told."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_gateway.judging.structured import (
    ANY_OBJECT,
    GrammarChecks,
    response_format,
    text_settings,
)
from diptych_testkit.tiny_gguf import tiny_card

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TEXT = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_free_text_needs_no_grammar(given: Any) -> None:
    assert response_format(raw(given)).grammar is None
    assert text_settings(raw(given and {"format": given})).grammar is None


def test_json_object_is_any_object() -> None:
    assert response_format(raw({"type": "json_object"})).grammar == ANY_OBJECT
    structure = text_settings(raw({"format": {"type": "json_object"}, "verbosity": "medium"}))
    assert structure.grammar == ANY_OBJECT
    assert json.loads(structure.echo) == {"type": "json_object"}


def test_a_schema_reaches_the_engine_as_written() -> None:
    structure = response_format(raw(CHAT))
    grammar = structure.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", SCHEMA)
    assert structure.param == "response_format.json_schema.schema"
    assert text_settings(raw(TEXT)).grammar == grammar


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "text", "extra": 1}, "response_format.extra"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
            "response_format.json_schema.name",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"title": "x" * 70_000}},
            },
            "response_format.json_schema.schema",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {}, "description": "x" * 20_000},
            },
            "response_format.json_schema.description",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_format_is_refused_by_name(changes: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        response_format(raw(changes))
    assert caught.value.param == param
    assert str(caught.value)


async def test_the_request_carries_the_grammar(stack: Any) -> None:
    answer = await stack.chat(response_format=CHAT)
    assert answer.status_code == 200
    (request,) = stack.fleet.requests
    assert request.sampling.grammar == response_format(raw(CHAT)).grammar


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "properties.a.not"),
        ({"items": {"type": "string", "pattern": "(?=a)b"}}, "items.pattern"),
        ({"anyOf": [{"type": "null"}, {"format": "stardate"}]}, "anyOf[1].format"),
        ({"$ref": "https://example.com/x"}, "$ref"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ],
)
async def test_what_cannot_be_obeyed_is_named_before_anything_is_accepted(
    stack: Any, schema: Any, place: str
) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = await stack.chat(response_format=given)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == f"response_format.json_schema.schema.{place}"
    assert error["code"] == "invalid_json_schema"
    answer = await stack.respond(
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"text.format.schema.{place}"
    assert not stack.fleet.requests


@pytest.mark.parametrize("schema", [[], 7, "x", None, True], ids=repr)
async def test_a_schema_is_an_object(stack: Any, schema: Any) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = await stack.chat(response_format=given)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"


async def test_a_schema_nested_without_end_is_refused(stack: Any) -> None:
    deep: Any = {"type": "null"}
    for _ in range(70):
        deep = {"items": deep}
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": deep}}
    answer = await stack.chat(response_format=given)
    assert answer.status_code == 400
    assert "64 levels" in answer.json()["error"]["message"]


async def test_a_response_says_which_form_was_asked_for(stack: Any, conforms: Any) -> None:
    answer = (await stack.respond(text=TEXT)).json()
    conforms(answer)
    assert answer["text"]["format"] == {
        "type": "json_schema",
        "name": "thing",
        "description": None,
        "schema": None,
        "strict": True,
    }
    again = (await stack.client.get(f"/v1/responses/{answer['id']}")).json()
    assert again["text"] == answer["text"]
    plain = (await stack.respond(text={"format": {"type": "json_object"}})).json()
    conforms(plain)
    assert plain["text"]["format"] == {"type": "json_object"}
    free, bound, any_object = (await stack.respond()).json(), *stack.fleet.requests[:2]
    assert free["text"]["format"] == {"type": "text"}
    assert bound.sampling.grammar == Grammar(
        kind="json_schema", text=msgspec.json.encode(SCHEMA).decode()
    )
    assert any_object.sampling.grammar == ANY_OBJECT


async def test_an_engine_that_follows_no_grammar_is_not_asked() -> None:
    card = msgspec.structs.replace(tiny_card(), grammars=False)
    with ThreadPoolExecutor(1) as executor:
        checks = GrammarChecks(executor)
        with pytest.raises(InvalidRequest, match="free text only") as caught:
            await checks.check(ANY_OBJECT, card, param="response_format")
        assert caught.value.param == "response_format"
        await checks.check(ANY_OBJECT, tiny_card(), param="response_format")


async def test_a_good_schema_is_no_good_grammar_of_another_kind() -> None:
    with ThreadPoolExecutor(1) as executor:
        checks = GrammarChecks(executor)
        await checks.check(ANY_OBJECT, tiny_card(), param="response_format")
        lark = Grammar(kind="lark", text=ANY_OBJECT.text)
        with pytest.raises(InvalidRequest):
            await checks.check(lark, tiny_card(), param="tools")


@pytest.mark.parametrize(("said", "told"), [(None, True), (True, True), (False, False)])
def test_an_answer_tells_how_strict_its_schema_was(said: bool | None, *, told: bool) -> None:
    structure = text_settings(raw({"format": {**TEXT["format"], "strict": said}}))
    assert json.loads(structure.echo)["strict"] is told


async def test_a_broken_grammar_of_our_own_making_is_refused_too() -> None:
    grammar = Grammar(kind="lark", text='start: "a" %json {"uniqueItems": true}')
    with (
        ThreadPoolExecutor(1) as executor,
        pytest.raises(InvalidRequest, match="uniqueItems") as caught,
    ):
        await GrammarChecks(executor).check(grammar, tiny_card(), param="tools")
    assert caught.value.param == "tools"


async def test_completions_take_a_form_too(stack: Any) -> None:
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 30, "n": 2, "response_format": CHAT}
    answer = await stack.client.post("/v1/completions", json=asked)
    assert answer.status_code == 200
    expected = response_format(raw(CHAT)).grammar
    assert [request.sampling.grammar for request in stack.fleet.requests] == [expected] * 2
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    answer = await stack.client.post("/v1/completions", json={**asked, "response_format": bad})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema.not"


@pytest.mark.parametrize("schema", [b'{"title":"\xff"}', b'{"\xed\xa0\x80":1}'])
def test_a_schema_that_is_no_text_is_told(schema: bytes) -> None:
    """Nobody has decoded it yet: it came along as it was written."""
    named = b'{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + b"}}"
    flat = b'{"format":{"type":"json_schema","name":"a","schema":' + schema + b"}}"
    with pytest.raises(InvalidRequest, match="expected JSON in UTF-8") as caught:
        response_format(msgspec.Raw(named))
    assert caught.value.param == "response_format.json_schema.schema"
    with pytest.raises(InvalidRequest, match="expected JSON in UTF-8") as caught:
        text_settings(msgspec.Raw(flat))
    assert caught.value.param == "text.format.schema"
