from random import Random

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_text.stopping import StopMatcher


def pushed(matcher: StopMatcher, *texts: str) -> list[str]:
    return [matcher.push(text) for text in texts]


def by_definition(text: str, stop: list[str]) -> tuple[str, bool]:
    """The match that is complete first; of two that end together, the longer."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stop if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher()
    assert pushed(matcher, "a", "", "b") == ["a", "", "b"]
    assert matcher.finish() == ""
    assert not matcher.stopped


def test_a_string_cut_by_token_borders_is_found_and_never_shown() -> None:
    matcher = StopMatcher(["STOP"])
    assert pushed(matcher, "go S", "T", "OP", "more") == ["go ", "", "", ""]
    assert matcher.stopped
    assert matcher.finish() == ""


def test_held_text_is_let_through_when_it_turns_out_harmless() -> None:
    matcher = StopMatcher(["STOP"])
    assert pushed(matcher, "S", "TO", "RE S") == ["", "", "STORE "]
    assert matcher.finish() == "S"
    assert not matcher.stopped


def test_only_the_longest_possible_prefix_is_held() -> None:
    matcher = StopMatcher(["aab"])
    assert pushed(matcher, "aaaa") == ["aa"]
    assert pushed(matcher, "b") == [""]
    assert matcher.stopped


def test_the_match_that_is_complete_first_wins_however_the_text_comes() -> None:
    at_once, piecewise = StopMatcher(["xxabyy", "ab"]), StopMatcher(["xxabyy", "ab"])
    assert pushed(at_once, "xxabyy") == ["xx"]
    assert "".join(pushed(piecewise, *"xxabyy")) == "xx"


def test_of_two_that_end_together_the_longer_counts() -> None:
    assert pushed(StopMatcher(["b", "ab"]), "xab") == ["x"]


def test_a_stop_string_in_several_scripts() -> None:
    matcher = StopMatcher(["。🦀"])
    assert pushed(matcher, "終わり。", "🦀!") == ["終わり", ""]
    assert matcher.stopped


@pytest.mark.parametrize("seed", range(60))
def test_text_dealt_out_in_any_way_stops_at_the_same_place(seed: int) -> None:
    rng = Random(seed)
    stop = ["".join(rng.choices("ab\n", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
    text = "".join(rng.choices("ab\n", k=rng.randint(0, 40)))
    matcher, shown, at = StopMatcher(stop), "", 0
    while at < len(text):
        step = rng.randint(1, 6)
        shown += matcher.push(text[at : at + step])
        assert by_definition(text, stop)[0].startswith(shown)
        at += step

    shown += matcher.finish()

    assert (shown, matcher.stopped) == by_definition(text, stop)


def test_a_long_self_similar_string_costs_little() -> None:
    matcher = StopMatcher(["a" * 50_000 + "b"])
    text = "a" * 100_000 + "c"
    assert matcher.push(text) == text


@pytest.mark.parametrize("stop", [["a"] * 5, [""], ["a", ""]])
def test_too_many_or_empty_strings_are_refused(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopMatcher(stop)
    assert caught.value.param == "stop"
