"""The fuzzers themselves: what no case may do is found, and is the same again."""

from random import Random
from typing import Any

import pytest

from diptych_contracts.errors import Permanent
from diptych_testkit.fuzzing.bending import TEXTS, as_json, bent_bytes, bent_text, bent_tree
from diptych_testkit.fuzzing.cases import (
    MAX_CASE_BYTES,
    MAX_TOLD_CHARS,
    Fault,
    Parser,
    check_case,
    most_bytes_held,
)
from diptych_testkit.fuzzing.parsers import PARSERS


def a_parser(read: Any, **changes: Any) -> Parser:
    values: dict[str, Any] = {"name": "x", "make": Random.random, "read": read, "cases": 1}
    return Parser(**(values | changes))


def raising(err: BaseException) -> Any:
    def read(_case: Any) -> None:
        raise err

    return read


def spinning(_case: Any) -> None:
    while True:
        try:
            while True:
                pass
        except Exception:  # as careless code would
            continue


def hoarding(_case: Any) -> None:
    assert b"x" * (most_bytes_held() + MAX_CASE_BYTES)


def test_an_answer_and_an_error_that_says_something_are_fine() -> None:
    check_case(a_parser(lambda case: None), 1, 1)
    check_case(a_parser(raising(Permanent("expected a, saw b"))), 1, 1)


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (raising(KeyError("a")), "raised KeyError"),
        (raising(BaseException("a panic")), "raised BaseException: a panic"),
        (raising(Permanent("")), "says nothing"),
        (raising(Permanent("x" * (MAX_TOLD_CHARS + 1))), "of 4001 characters"),
        (spinning, "took 0.2 s of CPU"),
        (hoarding, r"took \d\d\d MB"),
    ],
)
def test_what_no_case_may_do_is_found_and_said_how_to_make_again(read: Any, why: str) -> None:
    with pytest.raises(Fault, match=why) as caught:
        check_case(a_parser(read, cpu_s=0.2 if read is spinning else 30), 7, 3)
    assert "make fuzz PARSER=x SEED=7 CASE=3" in str(caught.value)


@pytest.mark.parametrize("name", PARSERS)
def test_a_case_follows_from_its_number(name: str) -> None:
    for number in range(5):
        first, again = (PARSERS[name].make(Random(f"1/{name}/{number}")) for _ in range(2))
        assert repr(first) == repr(again)


def test_bent_values_stay_values() -> None:
    rng = Random(1)
    for _ in range(300):
        assert isinstance(bent_bytes(rng, b"abc", [b"xyz"]), bytes)
        assert isinstance(bent_text(rng, "abc", TEXTS), str)
        assert as_json(rng, bent_tree(rng, {"a": [1, {"b": None}]}, ("c",)))
    assert bent_bytes(rng, b"") is not None
