from typing import Any

import pytest

from diptych_testkit.chaos.asking import Api, Ask, Leaving
from diptych_testkit.chaos.checking import (
    NONE,
    Damage,
    Expected,
    Outcome,
    Piece,
    Told,
    compare,
    judge,
)

WORDS = ("One", " two", " three", " four", " five")
WHOLE = tuple(Piece(place, text) for place, text in enumerate(WORDS))
EXPECTED = Expected(WHOLE, "length")
CHAT = Ask(prompt=0, api=Api.CHAT, max_tokens=5)
RESPONSE = Ask(prompt=0, api=Api.RESPONSES, max_tokens=5, resume=True)


def told(ask: Ask = CHAT, pieces: tuple[Piece, ...] = WHOLE, **changes: Any) -> Told:
    values: dict[str, Any] = {
        "outcome": Outcome.FINISHED,
        "finish": "length",
        "ends": 1,
        "request_id": "r1",
    }
    return Told(ask, 0.0, pieces=list(pieces), **(values | changes))


def test_an_undisturbed_answer_has_no_damage() -> None:
    assert compare(WHOLE, WHOLE, complete=True) == NONE
    assert compare(WHOLE[:2], WHOLE, complete=False) == NONE


@pytest.mark.parametrize(
    ("seen", "damage"),
    [
        ((*WHOLE[:2], *WHOLE[3:]), Damage(lost=1)),
        (WHOLE[:4], Damage(lost=1)),
        ((*WHOLE[:3], WHOLE[2], *WHOLE[3:]), Damage(repeated=1)),
        ((WHOLE[0], WHOLE[2], WHOLE[1], *WHOLE[3:]), Damage(reordered=1)),
        ((*WHOLE[:4], Piece(4, " six")), Damage(changed=1)),
        ((*WHOLE, Piece(5, " six")), Damage(changed=1)),
        ((WHOLE[1], WHOLE[0], WHOLE[0], WHOLE[4]), Damage(lost=2, repeated=1, reordered=1)),
    ],
)
def test_a_planted_fault_is_caught(seen: tuple[Piece, ...], damage: Damage) -> None:
    assert compare(seen, WHOLE, complete=True) == damage
    verdict = judge(told(pieces=seen), EXPECTED, gateway_struck=True)
    assert verdict.damage == damage
    assert verdict.broken


def test_a_gap_counts_even_in_an_answer_that_was_left() -> None:
    assert compare((WHOLE[0], WHOLE[2]), WHOLE, complete=False) == Damage(lost=1)


def test_a_kept_promise_is_not_reported() -> None:
    assert judge(told(), EXPECTED, gateway_struck=False).broken == ()


def test_a_hung_request_is_caught() -> None:
    hung = told(outcome=Outcome.HUNG, ends=0, pieces=WHOLE[:2], detail="silence")
    (broken,) = judge(hung, EXPECTED, gateway_struck=True).broken
    assert broken == "no terminal event: silence"


def test_two_ends_are_caught() -> None:
    (broken,) = judge(told(ends=2), EXPECTED, gateway_struck=False).broken
    assert broken == "2 terminal events"


def test_an_answer_that_stopped_for_another_reason_is_caught() -> None:
    (broken,) = judge(told(finish="stop"), EXPECTED, gateway_struck=False).broken
    assert "'stop' instead of 'length'" in broken


def test_only_its_gateways_fault_excuses_a_request_without_intent() -> None:
    failed = told(outcome=Outcome.FAILED, pieces=WHOLE[:2], detail="cancelled")
    assert judge(failed, EXPECTED, gateway_struck=False).broken == ("failed: cancelled",)
    assert judge(failed, EXPECTED, gateway_struck=True).broken == ()
    kept = told(RESPONSE, outcome=Outcome.FAILED, pieces=WHOLE[:2], detail="cancelled")
    assert judge(kept, EXPECTED, gateway_struck=True).broken == ("failed: cancelled",)


def test_a_response_with_an_id_is_never_broken_off() -> None:
    cut = {"outcome": Outcome.BROKEN, "ends": 0, "pieces": ()}
    assert judge(told(RESPONSE, **cut), EXPECTED, gateway_struck=True).broken
    assert not judge(told(RESPONSE, request_id="", **cut), EXPECTED, gateway_struck=True).broken
    assert not judge(told(**cut), EXPECTED, gateway_struck=True).broken
    assert judge(told(**cut), EXPECTED, gateway_struck=False).broken


def test_nobody_is_cancelled_unasked() -> None:
    cancelled = {"outcome": Outcome.CANCELLED, "pieces": WHOLE[:2]}
    assert judge(told(**cancelled), EXPECTED, gateway_struck=True).broken
    left = Ask(prompt=0, api=Api.CHAT, max_tokens=5, leaving=Leaving.MIDWAY)
    assert not judge(told(left, **cancelled), EXPECTED, gateway_struck=False).broken


def test_a_refusal_is_no_broken_promise() -> None:
    refused = told(outcome=Outcome.REFUSED, ends=0, pieces=())
    assert judge(refused, EXPECTED, gateway_struck=False).broken == ()
