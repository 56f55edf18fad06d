import json
from pathlib import Path
from typing import Any

import pytest

from diptych_contracts.errors import Permanent
from diptych_engine.folder_card import card_from_folder
from diptych_engine.sim_card import CHAT_TEMPLATE, sim_card
from diptych_text.codec import TextCodec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 2048,
    "vocab_size": 320,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
NAMES = {
    "bos_token": {"content": "<|im_start|>"},
    "eos_token": "<|endoftext|>",
    "chat_template": CHAT_TEMPLATE,
}


def write(folder: Path, **changes: Any) -> Path:
    files = {
        "config.json": CONFIG,
        "tokenizer_config.json": NAMES,
        "tokenizer.json": json.loads(sim_card(model="m").tokenizer_json),
    }
    for name, value in (files | changes).items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            (folder / name).write_text(text)
    return folder


def test_a_folder_says_all_a_gateway_needs(tmp_path: Path) -> None:
    generation = {"generation_config.json": {"eos_token_id": [2, 0]}}
    card = card_from_folder(write(tmp_path, **generation), model="m")
    assert (card.context_tokens, card.vocab_size) == (2048, 320)
    assert (card.eos_ids, card.bos_id, card.add_bos) == ((0, 2), 1, False)
    codec, expected = TextCodec.from_card(card), TextCodec.from_card(sim_card(model="m"))
    said = [{"role": "user", "content": "the thing"}]
    assert codec.encode_chat(said) == expected.encode_chat(said)


def test_the_base_is_of_shape_and_tokenizer_alone(tmp_path: Path) -> None:
    def base(**changes: Any) -> str:
        write(tmp_path, **{"config.json": CONFIG | changes})
        return card_from_folder(tmp_path, model="m").fingerprint.base

    assert base() == base(torch_dtype="float16") == base(transformers_version="5")
    assert base() != base(num_hidden_layers=3)


def test_a_template_may_lie_beside_or_among_others(tmp_path: Path) -> None:
    listed = NAMES | {"chat_template": [{"name": "default", "template": "one"}]}
    assert (
        card_from_folder(
            write(tmp_path, **{"tokenizer_config.json": listed}), model="m"
        ).chat_template
        == "one"
    )
    write(tmp_path, **{"chat_template.jinja": "two"})
    assert card_from_folder(tmp_path, model="m").chat_template == "two"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer.json": None}, "tokenizer.json: No such file"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: expected a tokenizer"),
        ({"config.json": "[]"}, "config.json: expected a JSON object"),
        ({"config.json": CONFIG | {"vocab_size": "many"}}, "positive vocab_size, saw 'many'"),
        ({"config.json": CONFIG | {"max_position_embeddings": 0}}, "max_position_embeddings"),
        ({"tokenizer_config.json": {}, "config.json": CONFIG | {"eos_token_id": 999}}, "no end"),
        ({"tokenizer_config.json": NAMES | {"chat_template": 1}}, "chat_template"),
        ({"tokenizer_config.json": NAMES | {"chat_template": "{% if"}}, "cannot be used"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(Permanent, match=told) as caught:
        card_from_folder(write(tmp_path, **changes), model="m")
    assert "\n" not in str(caught.value)
