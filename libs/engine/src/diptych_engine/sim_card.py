"""A model card without a model: a token per byte, so that the `sim` engine needs no weights."""

from diptych_contracts.cards import Fingerprint, ModelCard
from diptych_engine.gguf_card import BLOCK_TOKENS
from diptych_text.codec import TextCodec
from diptych_text.gguf_tokenizer import TokenType, tokenizer_json

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
CONTEXT_TOKENS = 8192
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters() -> list[str]:
    """The 256 letters of a byte-level vocabulary, in the order of GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in printable] + [chr(0x100 + n) for n in range(256 - len(printable))]


def sim_card(*, model: str) -> ModelCard:
    """A card of 260 tokens: three control tokens, the bytes, and one pair of them."""
    tokens = [*CONTROL_TOKENS, *byte_letters(), "th"]
    kinds = [TokenType.CONTROL] * len(CONTROL_TOKENS)
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": ["t h"],
    }
    return ModelCard(
        model=model,
        fingerprint=Fingerprint(base="sim-bytes-1", weights="none"),
        context_tokens=CONTEXT_TOKENS,
        block_tokens=BLOCK_TOKENS,
        vocab_size=len(tokens),
        eos_ids=(EOS_ID,),
        bos_id=BOS_ID,
        tokenizer_json=tokenizer_json(metadata),
        chat_template=CHAT_TEMPLATE,
        grammars=True,
    )


def spoken_tokens(codec: TextCodec) -> list[int]:
    """Tokens that are printable text by themselves: each yields one piece of text at once."""
    found = []
    for token in range(codec.vocab_size):
        try:
            text = codec.token_bytes(token).decode()
        except UnicodeDecodeError:
            continue
        if text and text.isprintable():
            found.append(token)
    return found
