import threading
import time

import msgspec
import pytest

from diptych_contracts.cards import Fingerprint, ModelCard
from diptych_contracts.errors import InvalidRequest, Permanent
from diptych_testkit.tiny_gguf import BOS_ID, EOS_ID, tiny_card, tiny_metadata
from diptych_text.codec import TextCodec
from diptych_text.gguf_tokenizer import tokenizer_json


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec.from_card(tiny_card())


def sentencepiece_card() -> ModelCard:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            *("<unk>", "<s>", "</s>"),
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *("▁", "h", "i", "hi", "▁hi"),
        ],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
        "tokenizer.ggml.scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0],
    }
    return ModelCard(
        model="sp",
        fingerprint=Fingerprint(base="b", weights="w"),
        context_tokens=64,
        block_tokens=64,
        vocab_size=264,
        eos_ids=(2,),
        bos_id=1,
        add_bos=True,
        tokenizer_json=tokenizer_json(metadata),
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )


def decoded(codec: TextCodec, ids: list[int]) -> str:
    return b"".join(map(codec.token_bytes, ids)).decode()


def test_a_rendered_chat_holds_control_ids(codec: TextCodec) -> None:
    text = codec.render([{"role": "user", "content": "Hello world"}])

    ids = codec.encode(text)

    assert [i for i in ids if codec.is_control(i)] == [BOS_ID, EOS_ID, BOS_ID]
    assert decoded(codec, ids) == "user\nHello world\nassistant\n"


def test_content_is_data_not_template(codec: TextCodec) -> None:
    content = "{{ 7 * 7 }}{% for x in y %}{# no #}"
    assert content in codec.render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "  spaces  \n\t",
        "naïve café",
        "日本語",
        "🦀👩‍👩‍👧",
        "1234",
        "\x00\x7f\u2028",
        "\ufffd",
    ],
)
def test_bytes_of_tokens_give_the_text_back(codec: TextCodec, text: str) -> None:
    assert decoded(codec, codec.encode(text)) == text


def test_every_byte_has_a_token(codec: TextCodec) -> None:
    singles = {codec.token_bytes(i) for i in range(codec.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles


def test_ids_outside_the_vocabulary_stand_for_nothing(codec: TextCodec) -> None:
    assert codec.token_bytes(codec.vocab_size) == b""
    assert codec.token_bytes(-1) == b""
    assert codec.token_bytes(10**12) == b""
    assert not codec.is_control(10**12)


def test_lone_surrogates_are_the_clients_mistake(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        codec.encode("\ud800")


def test_bos_is_added_once() -> None:
    codec = TextCodec.from_card(sentencepiece_card())

    assert codec.encode("hi") == [1, 263]
    assert codec.encode("hi", add_bos=False) == [263]
    assert codec.encode(codec.render([{"role": "user", "content": "hi"}])) == [1, 263, 2]
    assert TextCodec.from_card(tiny_card()).encode("a", add_bos=True)[0] == BOS_ID


def test_sentencepiece_bytes_are_text_with_spaces() -> None:
    codec = TextCodec.from_card(sentencepiece_card())

    assert decoded(codec, codec.encode("hi é", add_bos=False)) == " hi é"
    assert codec.token_bytes(3 + 0xE9) == b"\xe9"
    assert codec.token_bytes(0) == b""


def test_user_defined_tokens_are_shown_as_they_stand() -> None:
    metadata = tiny_metadata()
    metadata["tokenizer.ggml.tokens"] += ["Ġ<tool>"]
    metadata["tokenizer.ggml.token_type"] += [4]
    card = msgspec.structs.replace(
        tiny_card(), tokenizer_json=tokenizer_json(metadata), vocab_size=294
    )
    codec = TextCodec.from_card(card)
    assert codec.token_bytes(293) == "Ġ<tool>".encode()


@pytest.mark.parametrize("file", ["", "{}", "[]", '{"model": {}}', '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_named_with_its_model(file: str) -> None:
    card = msgspec.structs.replace(tiny_card(), tokenizer_json=file)
    with pytest.raises(Permanent, match="card of tiny has no usable tokenizer"):
        TextCodec.from_card(card)


def test_a_broken_template_is_refused_at_once() -> None:
    card = msgspec.structs.replace(tiny_card(), chat_template="{% for x %}")
    with pytest.raises(Permanent, match="chat template is broken at line 1"):
        TextCodec.from_card(card)


def test_other_threads_run_while_a_long_text_is_tokenized(codec: TextCodec) -> None:
    """Beats come from a thread: a gateway that was silent for a second is declared dead."""
    begun, ended = threading.Event(), threading.Event()
    seen = []

    def look() -> None:
        begun.set()
        while not ended.wait(0.001):
            seen.append(time.monotonic())

    looking = threading.Thread(target=look)
    looking.start()
    begun.wait()
    before = len(seen)
    codec.encode("the quick brown fox jumps " * 20_000)
    after = len(seen)
    ended.set()
    looking.join()
    assert after - before > 3, "it let go between two parts"


def test_a_tokenizer_that_makes_the_library_panic_is_named_too() -> None:
    """Its panics are no `Exception`: they would end the process."""
    file = tiny_card().tokenizer_json
    bent = file.replace('"continuing_subword_prefix":null', '"continuing_subword_prefix":"None"')
    assert bent != file
    card = msgspec.structs.replace(tiny_card(), tokenizer_json=bent)
    with pytest.raises(Permanent, match="card of tiny has no usable tokenizer: range end index"):
        TextCodec.from_card(card)


def test_a_text_in_parts_has_the_tokens_of_the_whole(codec: TextCodec) -> None:
    text = "Hello world, hello and so on " * 8000
    for add_bos in (None, False, True):
        parts = list(codec.text_parts(text, add_bos=add_bos))
        assert len(parts) > 1
        assert [token for part in parts for token in part] == codec.encode(text, add_bos=add_bos)
    assert [token for part in codec.text_parts("") for token in part] == codec.encode("")


def test_a_conversation_in_parts_is_rendered_where_it_is_read() -> None:
    card = msgspec.structs.replace(tiny_card(), chat_template="{{ raise_exception('no') }}")
    parts = TextCodec.from_card(card).chat_parts([{"role": "user", "content": "Hello"}])
    with pytest.raises(InvalidRequest):
        next(parts)


def test_tokens_are_written_out_with_control_tokens(codec: TextCodec) -> None:
    said = [{"role": "user", "content": "Hello wörld"}]
    ids = codec.encode_chat(said)
    assert codec.written(ids) == codec.render(said)
    assert codec.control_text(ids[0]) == codec.written(ids[:1])
    half = codec.encode("ö", add_bos=False)[:1]
    assert codec.written(half) == "\N{REPLACEMENT CHARACTER}"
    assert codec.control_text(10**6) == codec.written([10**6]) == ""
