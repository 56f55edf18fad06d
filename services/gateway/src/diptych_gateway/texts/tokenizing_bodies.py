"""Bodies and answers of `/tokenize` and `/detokenize`, as vLLM has them."""

import msgspec

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.judging.bodies import ChatMessage, decode_as
from diptych_gateway.judging.message_checks import conversation

MAX_TOKENS = 262_144
"""Of one answer, or one body: a second or so of the thread that tokenizes, others in between."""


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    """May be left out where one model is served."""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: whether the model's first token comes first, if it has one; true if absent."""
    add_generation_prompt: bool | None = None
    """Of messages: whether the head of an answer follows them; true if absent."""
    return_token_strs: bool | None = None


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class Text(msgspec.Struct):
    prompt: str


class Asked(msgspec.Struct, kw_only=True):
    """What is to be tokenized: a prompt or messages."""

    model: str | None
    prompt: str | None
    messages: list[dict[str, str]]
    add_special_tokens: bool
    add_generation_prompt: bool
    strings: bool

    @property
    def param(self) -> str:
        """What the client calls it."""
        return "messages" if self.prompt is None else "prompt"


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def decode_tokenize(data: bytes) -> Asked:
    """What `data` asks for. Raises `InvalidRequest`."""
    body = decode_as(_tokenize_decoder, data)
    if (body.prompt is None) == (body.messages is None):
        seen = "neither" if body.prompt is None else "both"
        text = f"expected either 'prompt' or 'messages', saw {seen}"
        raise InvalidRequest(text, param="prompt")
    wrong = "add_generation_prompt" if body.messages is None else "add_special_tokens"
    if getattr(body, wrong) is not None:
        other = "messages" if body.messages is None else "prompt"
        text = f"'{wrong}' is only allowed together with '{other}'"
        raise InvalidRequest(text, param=wrong)
    return Asked(
        model=body.model,
        prompt=body.prompt,
        messages=[] if body.messages is None else conversation(body.messages),
        add_special_tokens=body.add_special_tokens is not False,
        add_generation_prompt=body.add_generation_prompt is not False,
        strings=bool(body.return_token_strs),
    )


def decode_detokenize(data: bytes) -> DetokenizeBody:
    """What `data` asks for. Raises `InvalidRequest`."""
    body = decode_as(_detokenize_decoder, data)
    if len(body.tokens) > MAX_TOKENS:
        text = f"'tokens': expected at most {MAX_TOKENS}, saw {len(body.tokens)}"
        raise InvalidRequest(text, param="tokens")
    return body
