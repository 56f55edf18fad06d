"""JSON schemas as clients write them: which keywords can be obeyed, and where one cannot.

The answer to a schema is constrained, never merely hoped for. So a keyword that constrains and that
llguidance cannot keep is refused by name and place, as is one that JSON Schema does not know: it
may well have been meant to constrain. Annotations pass.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_text.grammars import check_grammar
from diptych_text.subschemas import subschemas

_TRIED_BYTES = 512 * 1024
"""Subschemas tried one by one to find a culprit, in all: some 0.1 s, off the event loop."""

OBEYED = frozenset(
    {"type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref"}
    | {"properties", "patternProperties", "additionalProperties", "required"}
    | {"minProperties", "maxProperties", "items", "prefixItems", "additionalItems"}
    | {"minItems", "maxItems", "minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
"""Keywords that constrain, and do so here."""
ANNOTATIONS = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly"}
    | {"writeOnly", "$comment", "$schema", "$id", "$anchor", "$defs", "definitions"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "discriminator"}
)
"""Keywords that constrain nothing."""


def check_schema(text: str, *, param: str) -> None:
    """See that the schema can be obeyed; 1 ms, 0.2 s at worst.

    Args:
        text: The schema as JSON.
        param: Where it stands in the request.

    Raises:
        InvalidRequest: names the keyword and its place.
    """
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as err:
        raise _wrong(param, f"expected a JSON schema: {err}") from err
    if not isinstance(schema, dict):
        raise _wrong(param, f"expected a JSON object, saw {type(schema).__name__}")
    parts = list(subschemas(schema, param))
    for at, subschema in parts:
        _check_keywords(at, subschema)
    try:
        check_grammar(Grammar(kind="json_schema", text=text))
    except InvalidRequest as err:
        raise _culprit(schema, parts) or _wrong(param, str(err)) from err


def _check_keywords(at: str, schema: Mapping[str, Any]) -> None:
    for keyword in schema:
        if keyword not in OBEYED and keyword not in ANNOTATIONS:
            name = keyword[:60]
            raise _wrong(f"{at}.{name}", f"the JSON schema keyword {name!r} is not supported")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise _wrong(f"{at}.$ref", f"expected a reference within the schema, saw {reference!r:.80}")


def _culprit(
    schema: dict[str, Any], parts: list[tuple[str, dict[str, Any]]]
) -> InvalidRequest | None:
    """What is wrong with the innermost subschema that is wrong by itself."""
    shared: dict[str, Any] = {
        name: schema[name] for name in ("$defs", "definitions") if name in schema
    }
    left_bytes = _TRIED_BYTES
    for at, subschema in parts:
        alone = {**shared, **subschema}
        left_bytes -= len(msgspec.json.encode(alone))
        if left_bytes < 0:
            return None
        message = _flaw(alone)
        if message is None:
            continue
        for keyword in ("pattern", "format", "oneOf", "$ref", "enum", "type"):
            if keyword not in subschema:
                continue
            if (narrower := _flaw({**shared, keyword: subschema[keyword]})) is not None:
                return _wrong(f"{at}.{keyword}", narrower)
        return _wrong(at, message)
    return None


def _flaw(schema: dict[str, Any]) -> str | None:
    try:
        check_grammar(Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode()))
    except InvalidRequest as err:
        return str(err)
    return None


def _wrong(at: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"'{at}': {message[:300]}", param=at[:200], code="invalid_json_schema")
