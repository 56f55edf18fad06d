"""What of a JSON schema can be obeyed, and how what cannot is told."""

import json
from typing import Any

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_text.grammars import MAX_GRAMMAR_BYTES, check_grammar, spelled
from diptych_text.schemas import ANNOTATIONS, OBEYED, check_schema
from diptych_text.subschemas import subschemas


def refusal(schema: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(json.dumps(schema), param="s")
    return caught.value


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"uniqueItems": True}, "s.uniqueItems"),
        ({"properties": {"a": {"if": {}, "then": {}}}}, "s.properties.a.if"),
        ({"$defs": {"x": {"items": {"contains": {}}}}}, "s.$defs.x.items.contains"),
        ({"prefixItems": [{}, {"not": {}}]}, "s.prefixItems[1].not"),
        ({"patternProperties": {"^a": {"nullable": True}}}, "s.patternProperties.^a.nullable"),
        (
            {"additionalProperties": {"dependentRequired": {}}},
            "s.additionalProperties.dependentRequired",
        ),
        ({"properties": {"a": {"type": "texts"}}}, "s.properties.a.type"),
        ({"items": {"format": "stardate"}}, "s.items.format"),
        ({"items": {"pattern": "(?<!a)b"}}, "s.items.pattern"),
        ({"$ref": "#/$defs/none"}, "s.$ref"),
        ({"allOf": [{"$ref": "other.json"}]}, "s.allOf[0].$ref"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "s.oneOf"),
        ({"type": "array", "items": {"enum": []}, "minItems": 1}, "s.items.enum"),
        ({"properties": {"n": {"minLength": "3"}}}, "s.properties.n"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_keyword_that_cannot_be_obeyed_is_named_with_its_place(schema: Any, param: str) -> None:
    error = refusal(schema)
    assert error.param == param
    assert error.code == "invalid_json_schema"
    assert str(error).startswith(f"'{param}': ")


def test_names_that_look_like_keywords_are_names() -> None:
    names = ["not", "if", "uniqueItems", "x-guidance", "format"]
    named = {"properties": {name: {"type": "null"} for name in names}}
    values = {"enum": [{"not": 1, "format": "date"}], "default": {"if": 2}}
    for schema in (named, values):
        check_schema(json.dumps(schema), param="s")
    assert {at for at, _ in subschemas(named, "s")} == {"s", *(f"s.properties.{n}" for n in names)}
    assert [at for at, _ in subschemas(values, "s")] == ["s"]


def test_annotations_change_nothing() -> None:
    about = dict.fromkeys(("title", "description", "$comment", "contentEncoding"), "x")
    check_schema(
        json.dumps({"type": "string", "examples": [1], "deprecated": True, **about}), param="s"
    )
    assert not OBEYED & ANNOTATIONS


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"x"', '{"a": NaN}', "[" * 5000])
def test_only_objects_are_schemas(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(text, param="s")
    assert caught.value.param == "s"


def test_a_schema_that_makes_the_library_panic_is_refused() -> None:
    """Its panics are no `Exception`: one request would have ended its gateway."""
    with pytest.raises(InvalidRequest, match="not a char boundary"):
        check_schema('{"type": "array", "maxItems": "' + "é" * 70 + '"}', param="x")


def test_limits_are_told() -> None:
    deep: Any = {}
    for _ in range(65):
        deep = {"anyOf": [deep]}
    assert "64 levels" in str(refusal(deep))
    assert str(MAX_GRAMMAR_BYTES) in str(refusal({"title": "x" * MAX_GRAMMAR_BYTES}))


def test_a_culprit_among_thousands_is_not_looked_for_without_end() -> None:
    wide = {f"p{n}": {"enum": [n]} for n in range(1000)}
    bad = {**wide, "bad": {"type": "integer", "minimum": 2, "maximum": 1}}
    shared = {"x": {"enum": list(range(2000))}}
    error = refusal({"type": "object", "properties": bad, "required": ["bad"], "$defs": shared})
    assert error.param == "s"
    assert "bad" in str(error)


def test_dates_and_times_are_such_that_readers_know() -> None:
    text = spelled(Grammar(kind="json_schema", text='{"items": {"format": "time"}}'))
    assert "[0-5]" in text
    own = spelled(Grammar(kind="json_schema", text='{"format": "time", "pattern": "^1"}'))
    assert "[0-5]" not in own
    data = spelled(Grammar(kind="json_schema", text='{"enum": [{"format": "time"}]}'))
    assert "[0-5]" not in data


def test_a_grammar_in_lark_is_judged_too() -> None:
    check_grammar(Grammar(kind="lark", text='start: "a" <[5]> %json {"type": "object"}'))
    with pytest.raises(InvalidRequest, match="nowhere"):
        check_grammar(Grammar(kind="lark", text="start: nowhere"))


@pytest.mark.parametrize("kind", ["lark", "json_schema"])
def test_what_is_wrong_is_said_in_a_thousand_characters(kind: Any) -> None:
    schema = '{"type": "string", "pattern": "(' + "a" * 5000 + '"}'
    text = f"start: a\na: b\nb: c\nc: %json {schema}" if kind == "lark" else schema
    with pytest.raises(InvalidRequest, match=r"unclosed group$") as told:
        check_grammar(Grammar(kind=kind, text=text))
    assert len(str(told.value)) < 1010


def test_inner_schemas_come_first() -> None:
    schema = {"properties": {"a": {"items": {"type": "null"}}}, "additionalProperties": False}
    assert [at for at, _ in subschemas(schema, "s")] == [
        "s.properties.a.items",
        "s.properties.a",
        "s",
    ]
