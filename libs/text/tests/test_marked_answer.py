import pytest

from diptych_contracts.answer_formats import AnswerFormat
from diptych_testkit.tiny_gguf import EOS_ID, tiny_card
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec
from diptych_text.marked_answer import MarkedText, answer_text

CODEC = TextCodec.from_card(tiny_card())
MARKERS = {EOS_ID: "<|im_end|>"}


def ids(text: str) -> list[int]:
    return CODEC.encode(text, add_bos=False)


def shown(text: MarkedText, token_ids: list[int]) -> str:
    pieces = [text.push((token,)) for token in token_ids]
    return "".join((*pieces, text.finish()))


@pytest.mark.parametrize("stop", [(), ("zz",), ("user",)])
def test_markers_stand_where_their_tokens_stood(stop: tuple[str, ...]) -> None:
    tokens = [*ids("Hello us"), EOS_ID, *ids("ual"), EOS_ID]
    assert shown(MarkedText(CODEC, stop, MARKERS), tokens) == "Hello us<|im_end|>ual<|im_end|>"


def test_a_stop_string_is_found_as_if_no_marker_stood_in_it() -> None:
    """A worker sees no markers, and stops here: so must the gateway."""
    tokens = [*ids("Hello us"), EOS_ID, *ids("er"), EOS_ID, *ids("more")]
    plain = AnswerText(CODEC, ("user",))
    text = MarkedText(CODEC, ("user",), MARKERS)
    assert shown(text, tokens) == "Hello "
    assert plain.push(tokens) == "Hello "
    assert text.stopped


def test_only_control_tokens_need_it() -> None:
    assert type(answer_text(CODEC)) is AnswerText
    assert type(answer_text(CODEC, made=AnswerFormat(tools="hermes"))) is AnswerText
