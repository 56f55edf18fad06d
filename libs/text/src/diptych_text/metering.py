"""A budget for the work of one template, so that a hostile one ends with an error.

Jinja's sandbox keeps a template away from Python; it does not keep it from running for hours or
from building a string of a terabyte. Every loop turn, call and filter is charged here, with the
size of what it gave. This bounds work; it does not make untrusted code welcome.
"""

from collections.abc import Mapping, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from diptych_contracts.errors import InvalidRequest

MAX_CHARS = 8_000_000
"""Longest value or output: a conversation of this length is the longest that is served."""
MAX_STEPS = 250_000
"""Loop turns, calls and filters of one rendering: 500 times what real templates take."""
_CHARS_PER_STEP = 1024


@dataclass(slots=True)
class Meter:
    """What one rendering has used."""

    steps: int = 0

    def charge(self, size: int = 0) -> None:
        """Count one step, and a value of `size` characters or items.

        Raises:
            InvalidRequest: if the value is too large or the budget is used up.
        """
        check_size(size)
        self.steps += 1 + size // _CHARS_PER_STEP
        if self.steps > MAX_STEPS:
            raise InvalidRequest(f"the chat template takes more than {MAX_STEPS} steps")


def check_size(size: int) -> None:
    """Raise `InvalidRequest` if a value of `size` characters or items is too large."""
    if size > MAX_CHARS:
        raise InvalidRequest(
            f"the chat template builds a value of {size} characters; {MAX_CHARS} are allowed"
        )


current: ContextVar[Meter] = ContextVar("diptych_template_meter")


def charge(value: Any = None) -> Any:
    """Charge the current rendering for `value` and give it back."""
    current.get().charge(len(value) if isinstance(value, Sized) else 0)
    return value


def measured(value: Any) -> Any:
    """`value`, if written out it would be of a reasonable size: lists are looked into."""
    if isinstance(value, str):
        check_size(len(value))
    elif isinstance(value, list | tuple | dict):
        _measure([value])
    return value


def _measure(pending: list[Any]) -> None:
    size = 0
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            pending += value
        size += 1
        check_size(size + len(pending))
