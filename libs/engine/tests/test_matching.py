"""Answers that follow a grammar, written by a model that knows nothing: every token is drawn."""

import json
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from diptych_contracts.errors import Permanent
from diptych_contracts.sampling import Grammar
from diptych_engine import matching
from diptych_engine.matching import FREE_TOKENS, Grammars, Matcher
from diptych_testkit.structured_list import schema_list, valid
from diptych_testkit.tiny_gguf import tiny_card
from diptych_text.codec import TextCodec

SCHEMAS = schema_list()
CARD = tiny_card()
CODEC = TextCodec.from_card(CARD)
THING = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
EOS = CARD.eos_ids[0]


@cache
def grammars() -> Grammars:
    return Grammars(CODEC, CARD.eos_ids)


def of(schema: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(schema))


def lark(text: str) -> Grammar:
    return Grammar(kind="lark", text=text)


def text_of(ids: list[int]) -> str:
    return b"".join(CODEC.token_bytes(token) for token in ids).decode()


def shortest(grammar: Grammar) -> int:
    """Tokens of the ending from the start."""
    matcher = grammars().matcher(grammar, (), max_tokens=10_000)
    assert matcher._ending is not None
    return len(matcher._ending)


def write(grammar: Grammar, max_tokens: int, *, seed: int, answer: list[int] | None = None) -> Any:
    """An answer whose every token is drawn by (seed, place), from `answer` on; it and its end."""
    ids = list(answer or ())
    matcher = grammars().matcher(grammar, ids, max_tokens=max_tokens)
    while len(ids) < max_tokens and not matcher.complete:
        choices = np.flatnonzero(matcher.allowed(CARD.vocab_size))
        drawn = int(Random(f"{seed} {len(ids)}").choice(choices))
        token = matcher.settle(drawn, left=max_tokens - len(ids))
        if token is None:
            break
        ids.append(token)
    return ids, matcher


@pytest.mark.parametrize("entry", SCHEMAS, ids=lambda entry: entry["name"])
def test_an_answer_ends_valid_whenever_the_shortest_would_fit(entry: dict[str, Any]) -> None:
    grammar = of(entry["schema"])
    least = shortest(grammar)
    for more, seed in ((0, 1), (1, 2), (7, 3), (40, 4)):
        ids, _ = write(grammar, least + more, seed=seed)
        valid(text_of(ids), entry["schema"])


@pytest.mark.parametrize("entry", SCHEMAS[::9], ids=lambda entry: entry["name"])
def test_wherever_an_answer_is_taken_up_again_it_goes_on_alike(entry: dict[str, Any]) -> None:
    grammar = of(entry["schema"])
    most = shortest(grammar) + 12
    whole, _ = write(grammar, most, seed=5)
    for at in range(len(whole)):
        assert write(grammar, most, seed=5, answer=whole[:at])[0] == whole


def test_only_matching_tokens_are_allowed_and_the_end_only_behind_the_answer() -> None:
    matcher = grammars().matcher(of(THING), (), max_tokens=99)
    answer = CODEC.encode('{"name": "th", "size": 7}', add_bos=False)
    for token in answer[:-1]:
        allowed = matcher.allowed(CARD.vocab_size)
        assert not allowed[EOS]
        assert matcher.settle(token, left=99) == token
    assert not matcher.accepting
    assert matcher.settle(answer[-1], left=99) == answer[-1]
    assert matcher.complete
    assert matcher.settle(EOS, left=99) is None


def test_the_end_of_text_may_be_ignored_where_something_else_may_follow() -> None:
    matcher = grammars().matcher(of({"type": "integer"}), (), max_tokens=9)
    matcher.settle(CODEC.encode("7", add_bos=False)[0], left=9)
    assert matcher.accepting
    assert matcher.allowed(CARD.vocab_size)[EOS]
    assert not matcher.allowed(CARD.vocab_size, ignore_eos=True)[EOS]
    done = grammars().matcher(of({"const": 7}), CODEC.encode("7", add_bos=False), max_tokens=9)
    assert done.complete
    assert done.allowed(CARD.vocab_size, ignore_eos=True)[EOS]


def test_where_even_the_shortest_does_not_fit_the_answer_is_cut() -> None:
    grammar = of(THING)
    ids, matcher = write(grammar, shortest(grammar) - 1, seed=1)
    assert len(ids) == shortest(grammar) - 1
    assert not matcher.accepting


def test_a_large_part_is_not_begun_when_it_would_not_fit() -> None:
    wide = {f"field_{n}": {"type": "integer"} for n in range(40)}
    huge = {"type": "object", "properties": wide, "required": list(wide)}
    schema = {"type": "object", "properties": {"huge": huge}, "additionalProperties": False}
    for seed in range(5):
        ids, _ = write(of(schema), 60, seed=seed)
        assert text_of(ids) == "{}"
    assert shortest(of(huge)) > FREE_TOKENS


def test_a_grammar_without_a_known_ending_is_obeyed_all_the_same() -> None:
    grammar = of({"type": "string", "pattern": "^x{5000}$"})
    matcher = grammars().matcher(grammar, (), max_tokens=50)
    assert matcher._ending is None
    ids, _ = write(grammar, 50, seed=1)
    assert text_of(ids) == '"' + "x" * 49


def test_other_languages_than_json() -> None:
    grammar = lark('start: "<call>" %json {"type": "object", "maxProperties": 0} "</call>"')
    ids, matcher = write(grammar, 50, seed=1)
    assert text_of(ids).replace(" ", "") == "<call>{}</call>"
    assert matcher.complete


def test_a_grammar_may_ask_for_control_tokens() -> None:
    grammar = lark('start: <[1]> %json {"type": "object", "required": ["th"]} "!"')
    ids, matcher = write(grammar, shortest(grammar), seed=1)
    assert ids[0] == 1
    assert text_of(ids[1:]).startswith('{"th')
    assert matcher.complete


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_schema", text="{"),
        Grammar(kind="json_schema", text="[]"),
        of({"type": "array", "uniqueItems": True}),
        of({"type": "integer", "minimum": 3, "maximum": 2}),
        lark("start: nowhere"),
        Grammar(kind="json_schema", text='{"title":"' + "x" * 70_000 + '"}'),
    ],
    ids=["half", "list", "unknown", "empty", "lark", "long"],
)
def test_a_broken_grammar_fails_for_good(grammar: Grammar) -> None:
    with pytest.raises(Permanent):
        grammars().matcher(grammar, (), max_tokens=9)


def test_a_grammar_that_allows_nothing_fails_for_good() -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    with pytest.raises(Permanent):
        write(of(loop), 9, seed=1)


def test_few_grammars_are_kept_and_none_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(CODEC, CARD.eos_ids)
    for number in range(matching.MAX_KEPT + 5):
        made.matcher(of({"const": number}), (), max_tokens=9)
    assert len(made._kept) == matching.MAX_KEPT
    monkeypatch.setattr(matching, "MAX_USES", 2)
    starts = [made._start(of(THING)) for _ in range(3)]
    assert starts[0] is starts[1]
    assert starts[1] is not starts[2]


def test_tokens_that_do_not_match_are_never_replayed() -> None:
    with pytest.raises(Permanent, match="does not match"):
        grammars().matcher(of(THING), CODEC.encode("[1]", add_bos=False), max_tokens=9)
    matcher: Matcher = grammars().matcher(of(THING), (), max_tokens=9)
    with pytest.raises(Permanent, match="does not match"):
        matcher.settle(CODEC.encode("]", add_bos=False)[0], left=9)
