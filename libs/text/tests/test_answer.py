from random import Random

import pytest

from diptych_testkit.tiny_gguf import EOS_ID, tiny_card
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

TEXT = "Hello world, naïve 🦀! STOP and on 日本語"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_card(tiny_card())


def test_an_answer_is_shown_whole(codec: TextCodec) -> None:
    answer = AnswerText(codec)
    shown = "".join(answer.push([i]) for i in [*codec.encode(TEXT), EOS_ID])
    assert shown + answer.finish() == TEXT
    assert not answer.stopped


def test_a_stop_string_ends_it_and_later_tokens_do_not_count(codec: TextCodec) -> None:
    answer = AnswerText(codec, ["STOP"])
    assert answer.push(codec.encode(TEXT)) == "Hello world, naïve 🦀! "
    assert answer.stopped
    assert answer.push(codec.encode("more")) == ""
    assert answer.finish() == ""


def test_held_text_comes_at_the_end(codec: TextCodec) -> None:
    answer = AnswerText(codec, ["STOPPED"])
    assert answer.push(codec.encode("a STOP")) == "a "
    assert answer.finish() == "STOP"
    assert answer.finish() == ""


def test_a_character_cut_at_the_end_shows_as_one_mark(codec: TextCodec) -> None:
    answer = AnswerText(codec, ["x"])
    assert answer.push(codec.encode("a🦀")[:-1]) == "a"
    assert answer.finish() == "\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_worker_and_gateway_agree_however_tokens_are_dealt_out(codec: TextCodec, seed: int) -> None:
    rng = Random(seed)
    ids = [rng.randrange(codec.vocab_size) for _ in range(60)]
    stop = ["e", "\ufffd\ufffd", "the", "Hello"][: rng.randint(0, 4)]
    worker, gateway = AnswerText(codec, stop), AnswerText(codec, stop)
    ends_at, by_one = len(ids), ""
    for position, token in enumerate(ids):
        by_one += worker.push([token])
        if worker.stopped:
            ends_at = position + 1
            break

    at_once = gateway.push(ids[:ends_at])

    assert at_once == by_one
    assert gateway.stopped == worker.stopped
    assert gateway.finish() == worker.finish()
