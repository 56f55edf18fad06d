"""What every engine must do, whoever made it: the same suite for all adapters.

An engine joins by a module in `diptych_testkit.engine_entries`.
"""

from dataclasses import replace
from typing import NoReturn

import pytest

from diptych_contracts.handoffs import EngineHandOff, FirstToken
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    HandOffReady,
    NewTokens,
    SequenceAborted,
    SequenceFailed,
    SequenceStarted,
    SequenceWork,
)
from diptych_testkit.engine_pairs import Duo, EngineEntry
from diptych_text.answer import AnswerText

pytestmark = [pytest.mark.timeout(300)]
TEXT = (
    "The lighthouse keeper wrote: le phare s'allume à la tombée de la nuit, 灯台の光が見える 🙂. "
    * 4
)
LENGTHS = (1, 31, 64, 65, 150)


def prompt(duo: Duo, length: int = 70, at: int = 0) -> tuple[int, ...]:
    ids = duo.codec.encode(TEXT)[at : at + length]
    assert len(ids) == length
    return tuple(ids)


def full(entry: EngineEntry, **changes: object) -> Stopping:
    values = {"max_tokens": entry.can.answer_tokens, "ignore_eos": True} | changes
    return Stopping(**values)  # type: ignore[arg-type]


def text_of(duo: Duo, ids: list[int]) -> str:
    answer = AnswerText(duo.codec)
    return answer.push(ids) + answer.finish()


@pytest.mark.parametrize("length", LENGTHS)
def test_no_token_comes_twice_or_is_missing(duo: Duo, entry: EngineEntry, length: int) -> None:
    job = duo.work(prompt(duo, length), stopping=full(entry))
    whole = duo.ask(job)
    assert len(whole) == entry.can.answer_tokens
    assert duo.decode.finish(job) is EndReason.LENGTH
    again = duo.work(job.prompt_ids, stopping=job.stopping)
    parts = duo.hand_over(again)
    assert len(parts) == len(whole)
    if entry.can.stays_greedy:
        assert parts == whole
    duo.is_empty()


def test_an_answer_goes_on_after_the_tokens_it_has(duo: Duo, entry: EngineEntry) -> None:
    job = duo.work(prompt(duo), stopping=full(entry))
    whole = duo.ask(job)
    for known in (1, 5, len(whole) - 1):
        rest = duo.work(job.prompt_ids, stopping=job.stopping, answer_ids=whole[:known])
        handed = duo.work(job.prompt_ids, stopping=job.stopping, answer_ids=whole[:known])
        left = duo.ask(rest)
        assert len(left) == len(whole) - known
        if entry.can.stays_greedy:
            assert [left, duo.hand_over(handed)] == [whole[known:]] * 2
    duo.is_empty()


def test_the_first_token_and_the_hand_off_come_as_the_terms_say(
    duo: Duo, entry: EngineEntry
) -> None:
    job = duo.work(prompt(duo), stopping=full(entry))
    leg, _ = duo.prefill_leg(job)
    rest, _ = duo.begin(job)
    duo.decode.engine.submit(rest)
    duo.decode.tokens(rest)
    duo.prefill.tokens(leg)
    kinds = [type(n) for n in duo.prefill.said(leg.key) if n.key == leg.key][:3]
    terms = duo.prefill.engine.spec.hand_off
    if duo.prefill is not duo.decode:
        expected = [SequenceStarted, HandOffReady, NewTokens]
        assert kinds == [kind for kind in expected if terms or kind is not HandOffReady]
    if terms is not None and terms.first_token is FirstToken.DECODE:
        assert not duo.prefill.so_far(leg)
    duo.is_empty()


def test_an_answer_of_one_token_needs_no_decode(duo: Duo, entry: EngineEntry) -> None:
    job = duo.work(prompt(duo), stopping=full(entry, max_tokens=1))
    (only,) = duo.ask(job)
    if not entry.can.prefill_ends:
        return
    leg, _ = duo.prefill_leg(duo.work(job.prompt_ids, stopping=job.stopping))
    duo.prefill.engine.submit(leg)
    assert duo.prefill.tokens(leg) == [only] or not entry.can.stays_greedy
    assert duo.prefill.finish(leg) is EndReason.LENGTH
    assert not [n for n in duo.prefill.said(leg.key) if isinstance(n, HandOffReady)] or (
        duo.prefill.engine.spec.hand_off is not None
        and duo.prefill.engine.spec.hand_off.pair_up_front
    )
    duo.is_empty()


def test_an_answer_that_has_all_it_may_have_is_over(duo: Duo, entry: EngineEntry) -> None:
    job = duo.work(prompt(duo), stopping=full(entry, max_tokens=3), answer_ids=prompt(duo, 3))
    assert duo.ask(job) == []
    assert duo.decode.finish(job) is EndReason.LENGTH


def test_the_end_of_text_ends_an_answer_and_is_not_part_of_it(duo: Duo, entry: EngineEntry) -> None:
    if not entry.can.logit_bias:
        pytest.skip("logit_bias is not obeyed, which alone can make a toy model end")
    eos = duo.decode.engine.spec.eos_ids[0]
    wants_to_end = Sampling(temperature=0, logit_bias=((eos, 100.0),))
    job = duo.work(prompt(duo), stopping=full(entry, ignore_eos=False), sampling=wants_to_end)
    assert duo.ask(job) == []
    assert duo.decode.finish(job) is EndReason.STOP
    if entry.can.prefill_ends:
        ends = duo.work(job.prompt_ids, stopping=job.stopping, sampling=wants_to_end)
        leg, _ = duo.prefill_leg(ends)
        duo.prefill.engine.submit(leg)
        assert duo.prefill.tokens(leg) == []
        assert duo.prefill.finish(leg) is EndReason.STOP
    on = duo.work(job.prompt_ids, stopping=full(entry, max_tokens=4), sampling=wants_to_end)
    assert duo.ask(on) == [eos] * 4
    assert duo.decode.finish(on) is EndReason.LENGTH
    duo.is_empty()


def test_a_stop_string_ends_an_answer_across_tokens(duo: Duo, entry: EngineEntry) -> None:
    job = duo.work(prompt(duo), stopping=full(entry))
    whole = duo.ask(job)
    stop, at = border(duo, whole)
    stopping = full(entry, stop=(stop,))
    for ask in (duo.ask, duo.hand_over):
        cut = duo.work(job.prompt_ids, stopping=stopping)
        assert ask(cut) == whole[: at + 1]
        assert duo.decode.finish(cut) is EndReason.STOP
        answer = AnswerText(duo.codec, (stop,))
        assert stop not in answer.push(whole[: at + 1]) + answer.finish()
    duo.is_empty()


def border(duo: Duo, ids: list[int]) -> tuple[str, int]:
    """A string that two neighbouring tokens of an answer spell, not the first ones; and where."""
    for at in range(3, len(ids)):
        pair = b"".join(duo.codec.token_bytes(i) for i in ids[at - 1 : at + 1])
        try:
            text = pair.decode()
        except UnicodeDecodeError:
            continue
        if len(text) > 1 and text.isprintable() and text not in text_of(duo, ids[:at]):
            return text, at
    raise AssertionError("no two tokens spell a text")


def refused(duo: Duo, parameter: str) -> NoReturn:
    """What cannot be tried is in the model's card, so the gateway turns away who asks for it."""
    for side in (duo.prefill, duo.decode):
        assert parameter in side.engine.spec.unsupported
    pytest.skip(f"{parameter} is refused by the gateway")


def test_a_seed_gives_the_same_answer_everywhere(duo: Duo, entry: EngineEntry) -> None:
    if not entry.can.seeds:
        refused(duo, "seed")
    seeded = [Sampling(temperature=1.2, seed=seed) for seed in (7, 7, 8)]
    jobs = [duo.work(prompt(duo), stopping=full(entry), sampling=s) for s in seeded]
    one, two, other = [duo.ask(job) for job in jobs]
    assert one == two
    assert one != other
    again = duo.work(prompt(duo), stopping=full(entry), sampling=seeded[0])
    assert duo.hand_over(again) == one


def test_logprobs_come_one_per_token(duo: Duo, entry: EngineEntry) -> None:
    if not entry.can.logprobs:
        refused(duo, "logprobs")
    sampling = Sampling(temperature=0, top_logprobs=2)
    job = duo.work(prompt(duo), stopping=full(entry), sampling=sampling)
    whole = duo.ask(job)
    told = [c for n in duo.decode.said(job.key) if isinstance(n, NewTokens) for c in n.logprobs]
    assert [chances[0][0] for chances in told] == whole
    assert all(chance <= 0 for chances in told for _, chance in chances)


def test_text_is_the_same_however_tokens_come(duo: Duo, entry: EngineEntry) -> None:
    """Tokens may end within a character; the text of all deltas is that of the whole."""
    job = duo.work(prompt(duo), stopping=full(entry))
    ids = duo.hand_over(job)
    answer = AnswerText(duo.codec)
    said = [n for n in duo.decode.said(job.key) if isinstance(n, NewTokens)]
    shown = answer.push(ids[: said[0].index if said else 0])
    for news in said:
        shown += answer.push(news.token_ids)
    assert shown + answer.finish() == text_of(duo, ids)
    raw = b"".join(duo.codec.token_bytes(i) for i in ids)
    assert text_of(duo, ids) == raw.decode(errors="replace")


def test_many_at_once_all_get_their_own_answer(duo: Duo, entry: EngineEntry) -> None:
    jobs = [
        duo.work(prompt(duo, 20 + n % 40, at=n), stopping=full(entry, max_tokens=8 + n % 8))
        for n in range(entry.can.crowd)
    ]
    for job in jobs:
        duo.decode.engine.submit(job)
    answers = [duo.decode.tokens(job) for job in jobs]
    assert [len(answer) for answer in answers] == [job.stopping.max_tokens for job in jobs]
    if entry.can.stays_greedy:
        for at in range(0, len(jobs), 16):
            alone = duo.work(jobs[at].prompt_ids, stopping=jobs[at].stopping)
            assert answers[at] == duo.ask(alone)
    duo.is_empty()


def test_many_hand_overs_at_once_all_arrive(duo: Duo, entry: EngineEntry) -> None:
    spec = duo.prefill.engine.spec
    crowd = min(spec.max_sequences, 8)  # a leg that waits for its peer keeps its seat
    jobs = [duo.work(prompt(duo, 20 + n, at=n), stopping=full(entry)) for n in range(crowd)]
    begun = [duo.begin(job) for job in jobs]
    for rest, _ in begun:
        duo.decode.engine.submit(rest)
    answers = [[*ids, *duo.decode.tokens(rest)] for rest, ids in begun]
    assert all(len(answer) == entry.can.answer_tokens for answer in answers)
    if entry.can.stays_greedy:
        assert answers[3] == duo.ask(duo.work(jobs[3].prompt_ids, stopping=jobs[3].stopping))
    duo.is_empty()


def long(duo: Duo, entry: EngineEntry) -> SequenceWork:
    if not entry.can.grows_slowly:
        pytest.skip("its answers end before they can be aborted")
    room = duo.decode.engine.spec.context_tokens - 70
    return duo.work(prompt(duo), stopping=full(entry, max_tokens=room))


def is_aborted(duo: Duo, job: SequenceWork) -> None:
    duo.decode.first(job.key, SequenceAborted)
    said = duo.decode.said(job.key)
    assert isinstance(said[-1], SequenceAborted), said[-1]
    assert len([n for n in said if isinstance(n, SequenceAborted)]) == 1
    assert not [n for n in said if isinstance(n, SequenceFailed)]


def test_an_unknown_sequence_is_aborted_too(duo: Duo, entry: EngineEntry) -> None:
    job = duo.work(prompt(duo), stopping=full(entry))
    duo.decode.engine.abort(job.key)
    is_aborted(duo, job)


def test_an_abort_before_anything_leaves_nothing(duo: Duo, entry: EngineEntry) -> None:
    job = long(duo, entry)
    duo.decode.engine.submit(job)
    duo.decode.engine.abort(job.key)
    is_aborted(duo, job)
    duo.is_empty()


def test_an_abort_while_queued_leaves_nothing(duo: Duo, entry: EngineEntry) -> None:
    seats = duo.decode.engine.spec.max_sequences
    jobs = [long(duo, entry) for _ in range(seats + 2)]
    for job in jobs:
        duo.decode.engine.submit(job)
    assert duo.decode.engine.load().waiting > 0
    for job in reversed(jobs):
        duo.decode.engine.abort(job.key)
    for job in jobs:
        is_aborted(duo, job)
    duo.is_empty()


def test_an_abort_while_decoding_leaves_nothing(duo: Duo, entry: EngineEntry) -> None:
    job = long(duo, entry)
    duo.decode.engine.submit(job)
    duo.decode.first(job.key, NewTokens)
    duo.decode.engine.abort(job.key)
    is_aborted(duo, job)
    assert duo.decode.so_far(job)
    duo.is_empty()


def test_an_abort_while_prefilling_leaves_nothing(duo: Duo, entry: EngineEntry) -> None:
    leg, _ = duo.prefill_leg(duo.work(prompt(duo, 150), stopping=full(entry)))
    duo.prefill.engine.submit(leg)
    duo.prefill.first(leg.key, SequenceStarted)
    duo.prefill.engine.abort(leg.key)
    duo.prefill.first(leg.key, SequenceAborted)
    duo.is_empty()


def test_an_abort_of_what_was_offered_leaves_nothing(duo: Duo, entry: EngineEntry) -> None:
    job = duo.work(prompt(duo), stopping=full(entry))
    leg, _ = duo.prefill_leg(job)
    duo.begin(job)
    duo.prefill.engine.abort(leg.key)
    duo.prefill.first(leg.key, SequenceAborted)
    duo.is_empty()


def test_an_abort_before_decode_has_said_anything_leaves_nothing(
    duo: Duo, entry: EngineEntry
) -> None:
    rest, _ = duo.begin(duo.work(prompt(duo), stopping=full(entry)))
    leg, _ = duo.prefill_leg(rest)
    duo.decode.engine.submit(rest)
    duo.decode.engine.abort(rest.key)
    duo.decode.first(rest.key, SequenceAborted)
    duo.prefill.engine.abort(leg.key)
    duo.is_empty()


def test_a_bad_request_is_refused_for_good(duo: Duo, entry: EngineEntry) -> None:
    spec = duo.decode.engine.spec
    for ids in ((-1,), (spec.vocab_size,), (), (5,) * spec.context_tokens):
        job = duo.work(ids, stopping=full(entry))
        duo.decode.engine.submit(job)
        failure = duo.decode.failure(job)
        assert failure.permanent, failure
        assert failure.detail
    duo.is_empty()


def test_a_hand_off_of_another_engine_is_refused(duo: Duo, entry: EngineEntry) -> None:
    rest, _ = duo.begin(duo.work(prompt(duo), stopping=full(entry)))
    if rest.hand_off is None:
        strange = replace(rest, blocks=rest.blocks[:-1])
    else:
        terms = rest.hand_off.terms
        fields = {name: getattr(terms, name) for name in terms.__struct_fields__}
        other = type(terms)(**fields | {"engine_version": "0.0"})
        hand_off = EngineHandOff(terms=other, opaque=rest.hand_off.opaque)
        strange = replace(rest, hand_off=hand_off)
    duo.decode.engine.submit(strange)
    failure = duo.decode.failure(strange)
    assert not failure.permanent, failure
    duo.prefill.engine.abort(duo.prefill_leg(rest)[0].key)
    duo.is_empty()


def test_an_attempt_is_here_once(duo: Duo, entry: EngineEntry) -> None:
    job = long(duo, entry)
    duo.decode.engine.submit(job)
    with pytest.raises(ValueError, match="already here"):
        duo.decode.engine.submit(job)
    duo.decode.engine.abort(job.key)
    is_aborted(duo, job)


def test_nothing_is_heard_while_nothing_can_be_told(duo: Duo, entry: EngineEntry) -> None:
    job = long(duo, entry)
    duo.decode.engine.submit(job)
    duo.decode.first(job.key, NewTokens)
    duo.decode.pausing = True
    duo.decode.engine.abort(job.key)
    is_aborted(duo, job)
    duo.decode.pausing = False
    duo.is_empty()


def test_a_dead_engine_fails_what_it_has_and_what_comes(fresh: Duo, entry: EngineEntry) -> None:
    if fresh.pair.kill is None:
        pytest.skip("its engine is this process: the suite would die with it")
    job = long(fresh, entry)
    fresh.decode.engine.submit(job)
    fresh.decode.first(job.key, NewTokens)
    fresh.pair.kill()
    failure = fresh.decode.failure(job)
    assert (failure.reason, failure.permanent) == ("engine_gone", False)
    late = fresh.work(prompt(fresh), stopping=full(entry))
    fresh.decode.engine.submit(late)
    assert fresh.decode.failure(late).reason == "engine_gone"
    fresh.decode.is_empty()


def test_what_it_says_of_itself_fits_together(duo: Duo, entry: EngineEntry) -> None:
    one, two = duo.prefill.engine.spec, duo.decode.engine.spec
    assert one.fingerprint == two.fingerprint
    assert one.layout == two.layout
    assert one.hand_off == two.hand_off
    for spec in (one, two):
        assert 0 < spec.context_tokens <= spec.kv_tokens
        assert spec.max_sequences > 0
        assert spec.vocab_size >= duo.codec.vocab_size
        assert all(0 <= eos < spec.vocab_size for eos in spec.eos_ids)
        assert spec.engine
        if spec.hand_off is not None:
            assert spec.hand_off.kind
            assert spec.hand_off.engine_version
            pairs_up_front = spec.hand_off.pair_up_front
            assert not (pairs_up_front and spec.hand_off.first_token is FirstToken.PREFILL)
    assert duo.prefill.engine.gone is None
