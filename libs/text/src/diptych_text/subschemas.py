"""The schemas within a JSON schema."""

from collections.abc import Iterator
from typing import Any

from diptych_contracts.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of schemas within schemas."""
_SCHEMA = frozenset({"additionalProperties", "items", "additionalItems"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def subschemas(schema: Any, at: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """`schema` and all schemas within it, each with its place below `at`; inner ones first.

    What is data (`enum`, `const`, `default`) or constrains nothing is no schema. A reader may
    change the keywords of what it gets.

    Raises:
        InvalidRequest: they are nested more than 64 deep.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequest(
            f"'{at[:200]}': expected at most {MAX_DEPTH} levels of schemas within schemas",
            param=at[:200],
            code="invalid_json_schema",
        )
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        for place, inner in _parts(keyword, value):
            yield from subschemas(inner, f"{at}.{keyword}{place}", depth + 1)
    yield at, schema


def _parts(keyword: str, value: Any) -> list[tuple[str, Any]]:
    if keyword in _NAMED and isinstance(value, dict):
        return [(f".{name[:60]}", inner) for name, inner in value.items()]
    if keyword in _SCHEMAS and isinstance(value, list):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    return [("", value)] if keyword in _SCHEMA else []
