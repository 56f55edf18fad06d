"""The list of a hundred schemas that structured output is measured by, and the judge of answers."""

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

_LIST = Path(__file__).parents[4] / "tests" / "structured" / "schemas.json"
_checker = jsonschema.FormatChecker(formats=())
_checker.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)


def _is_moment(value: object) -> bool:
    return not isinstance(value, str) or bool(datetime.fromisoformat(value.upper()))


def _is_time(value: object) -> bool:
    return not isinstance(value, str) or bool(datetime.fromisoformat(f"2000-01-01T{value.upper()}"))


_checker.checkers |= {
    "date-time": (_is_moment, (ValueError,)),
    "time": (_is_time, (ValueError,)),
}


@cache
def schema_list() -> tuple[dict[str, Any], ...]:
    """Each with `name`, `ask` (what to ask a model) and `schema`."""
    return tuple(json.loads(_LIST.read_text()))


def valid(text: str, schema: Any) -> Any:
    """The value that `text` says; raises unless it is JSON that matches `schema`, formats too."""
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema, format_checker=_checker).validate(value)
    return value
