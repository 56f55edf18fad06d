"""Lists a client takes in pages: `limit` and `after`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Scope

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.listening.reading import parameters

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Paging:
    """What the query of a list asks for."""

    limit: int
    after: str | None
    more: Mapping[str, str]
    """Its other parameters."""


def paging(scope: Scope, *, most: int, usual: int, more: tuple[str, ...] = ()) -> Paging:
    """What the query asks for.

    Raises:
        InvalidRequest: names the parameter.
    """
    given = parameters(scope)
    limit, after = given.pop("limit", str(usual)), given.pop("after", None)
    others = {name: given.pop(name) for name in more if name in given}
    if given:
        name = next(iter(given))[:80]
        raise InvalidRequest(f"unknown parameter '{name}'", param=name, code="unknown_parameter")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
        text = f"'limit': expected 1 to {most}, saw {limit[:40]!r}"
        raise InvalidRequest(text, param="limit")
    return Paging(int(limit), after or None, others)


def page(
    found: Sequence[T], asked: Paging, *, name: Callable[[T], str]
) -> tuple[Sequence[T], bool]:
    """The page of `found` that was asked for, and whether there are more.

    Raises:
        InvalidRequest: there is nothing of the name after which it begins.
    """
    start = 0
    if asked.after is not None:
        names = [name(item) for item in found]
        if asked.after not in names:
            text = f"'after': expected an id of this list, saw {asked.after[:80]!r}"
            raise InvalidRequest(text, param="after")
        start = names.index(asked.after) + 1
    end = start + asked.limit
    return found[start:end], end < len(found)
