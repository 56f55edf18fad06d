from random import Random

import msgspec
import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason, Fence, Started, TokenEntry, TokenFrame
from diptych_policy.journal import NOTHING, Change, RequestView, parts
from diptych_testkit.builders import REQUEST, an_end, tokens


@pytest.fixture
def view() -> RequestView:
    return RequestView(REQUEST)


def fence(attempt: int) -> Fence:
    return Fence(request_id=REQUEST, attempt=attempt)


def test_a_frame_splits_into_tokens_then_ends() -> None:
    frame = TokenFrame(
        worker=Incarnation("w"), entries=(tokens(1), tokens(2, of="r2")), ends=(an_end(),)
    )
    assert list(parts(frame)) == [tokens(1), tokens(2, of="r2"), an_end()]
    assert list(parts(fence(2))) == [fence(2)]


def test_tokens_are_delivered_once_and_in_order(view: RequestView) -> None:
    assert view.apply(tokens(7)) == Change(new_ids=(7,))
    assert view.apply(tokens(7)) == NOTHING
    assert view.apply(tokens(9, index=2)) == NOTHING
    assert view.apply(tokens(8, index=1)) == Change(new_ids=(8, 9))
    assert view.token_ids == [7, 8, 9]


def test_an_overlapping_entry_adds_only_its_new_part(view: RequestView) -> None:
    view.apply(tokens(1, 2))
    assert view.apply(tokens(2, 3, index=1)) == Change(new_ids=(3,))


def test_after_a_fence_older_attempts_are_dropped(view: RequestView) -> None:
    view.apply(tokens(1, 2))
    assert view.apply(fence(2)) == Change(attempt=2)
    assert view.apply(tokens(99, index=2)) == NOTHING
    assert view.apply(an_end()) == NOTHING
    assert not view.attempt_has_tokens
    assert view.apply(tokens(3, index=2, attempt=2)) == Change(new_ids=(3,))
    assert view.attempt_has_tokens


def test_a_fence_discards_what_waits_for_a_gap(view: RequestView) -> None:
    view.apply(tokens(5, index=1))
    view.apply(an_end(tokens=2))
    view.apply(fence(2))
    assert view.apply(tokens(1, attempt=2)) == Change(new_ids=(1,))
    assert view.end is None


def test_a_fence_counts_once_and_never_backwards(view: RequestView) -> None:
    view.apply(fence(3))
    assert view.apply(fence(3)) == NOTHING
    assert view.apply(fence(2)) == NOTHING
    assert view.attempt == 3


def test_tokens_of_an_unannounced_attempt_are_dropped(view: RequestView) -> None:
    assert view.apply(tokens(1, attempt=2)) == NOTHING


def test_the_first_end_counts_and_nothing_after_it(view: RequestView) -> None:
    view.apply(tokens(1))
    end = an_end(tokens=1)
    assert view.apply(end) == Change(end=end)
    assert view.apply(an_end(EndReason.FAILED)) == NOTHING
    assert view.apply(tokens(2, index=1)) == NOTHING
    assert view.apply(fence(2)) == NOTHING
    assert view.end == end


def test_an_end_waits_for_the_tokens_it_counts(view: RequestView) -> None:
    end = an_end(tokens=2)
    assert view.apply(end) == NOTHING
    assert view.apply(tokens(1)) == Change(new_ids=(1,))
    assert view.apply(tokens(2, index=1)) == Change(new_ids=(2,), end=end)


def test_an_end_that_counts_no_tokens_ends_at_once(view: RequestView) -> None:
    end = an_end(EndReason.CANCELLED)
    assert view.apply(end) == Change(end=end)


def test_facts_that_are_not_tokens_change_nothing(view: RequestView) -> None:
    started = Started(request_id=REQUEST, attempt=1, worker=Incarnation("w"), phase="decode")
    assert view.apply(started) == NOTHING


@pytest.mark.parametrize("seed", range(20))
def test_any_duplication_gives_the_same_answer(seed: int) -> None:
    rng = Random(seed)
    entries = [tokens(i, index=i) for i in range(30)]
    storm = [entry for entry in entries for _ in range(rng.randint(1, 3))]
    storm += rng.choices(entries, k=20)
    rng.shuffle(storm)
    view = RequestView(REQUEST)
    delivered = [token for entry in storm for token in view.apply(entry).new_ids]
    assert delivered == view.token_ids == list(range(30))


def test_an_end_without_a_number_does_not_wait_behind_one_with_a_gap(view: RequestView) -> None:
    """A cancel once waited for a token that had died with its worker: the request never ended."""
    view.apply(tokens(9, index=1))
    assert view.apply(an_end(tokens=2)) == NOTHING
    cancelled = an_end(EndReason.CANCELLED)
    assert view.apply(cancelled) == Change(end=cancelled)


def test_of_two_ends_with_a_gap_the_first_counts(view: RequestView) -> None:
    view.apply(an_end(tokens=1))
    view.apply(an_end(EndReason.LENGTH, tokens=1))
    assert view.apply(tokens(7)).end == an_end(tokens=1)


def told(*token_ids: int, index: int = 0, attempt: int = 1) -> TokenEntry:
    """Tokens whose logprobs name them."""
    entry = tokens(*token_ids, index=index, attempt=attempt)
    logprobs = tuple(((token, -float(attempt)),) for token in token_ids)
    return msgspec.structs.replace(entry, logprobs=logprobs)


def test_logprobs_stay_beside_their_tokens() -> None:
    """Across gaps, repeats, overlaps and fences."""
    view = RequestView(REQUEST, logprobs=[])
    for part in (
        told(7),
        told(7),
        told(9, 10, index=2),
        told(7, 8, 9, index=0),
        told(99, index=5),
        fence(2),
        told(98, index=4),
        told(11, 12, index=4, attempt=2),
    ):
        view.apply(part)
    assert view.token_ids == [7, 8, 9, 10, 11, 12]
    old, new = -1.0, -2.0
    assert view.logprobs == [
        ((7, old),),
        ((8, old),),
        ((9, old),),
        ((10, old),),
        ((11, new),),
        ((12, new),),
    ]


def test_tokens_without_logprobs_have_none_in_their_place(view: RequestView) -> None:
    view.apply(told(7))
    assert view.logprobs is None
    asking = RequestView(REQUEST, logprobs=[])
    for part in (told(7), tokens(8, 9, index=1), told(10, index=3)):
        asking.apply(part)
    assert asking.logprobs == [((7, -1.0),), (), (), ((10, -1.0),)]
