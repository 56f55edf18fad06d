"""The body of `POST /v1/embeddings`, what it means, and what a client is sent."""

import re
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import InvalidRequest
from diptych_gateway.judging.bodies import ABSENT, decode_as
from diptych_gateway.judging.harmless import shown

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 65_536
"""Of all inputs together."""
BASE64 = "base64"
_FORMS = "text, a list of texts, token ids, or a list of lists of token ids"
_BEGINNING = re.compile(rb"[ \t\r\n]*(\[?)[ \t\r\n]*(.)", re.DOTALL)
T = TypeVar("T")
_text_decoder = msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[int])
_all_ids_decoder = msgspec.json.Decoder(list[list[int]])


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: msgspec.Raw
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or their little-endian float32 bytes in base64."""


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsCall:
    """What a client wants vectors of, judged."""

    model: str
    inputs: Sequence[str | list[int]]
    several: bool
    """Whether it came as a list, so that an input has a number."""
    base64: bool
    dimensions: int | None

    def at(self, number: int) -> str:
        """What the client calls an input."""
        return f"input[{number}]" if self.several else "input"


_decoder = msgspec.json.Decoder(EmbeddingsBody)


def judge_embeddings(data: bytes) -> EmbeddingsCall:
    """What `data` asks for.

    Raises:
        InvalidRequest: names the parameter, and says what was expected and seen.
    """
    body = decode_as(_decoder, data)
    if body.encoding_format not in (None, "float", BASE64):
        seen = shown(body.encoding_format)
        text = f"'encoding_format': expected 'float' or 'base64', saw {seen}"
        raise InvalidRequest(text, param="encoding_format")
    if body.dimensions is not None and body.dimensions < 1:
        text = f"'dimensions': expected at least 1, saw {body.dimensions}"
        raise InvalidRequest(text, param="dimensions")
    inputs, several = _inputs(body.input)
    call = EmbeddingsCall(
        model=body.model,
        inputs=inputs,
        several=several,
        base64=body.encoding_format == BASE64,
        dimensions=body.dimensions,
    )
    for number, one in enumerate(inputs):
        if not one:
            at = call.at(number)
            raise InvalidRequest(f"'{at}': expected text or token ids, saw none", param=at)
    return call


def check_fit(call: EmbeddingsCall, card: ModelCard) -> None:
    """Raise `InvalidRequest` for what the model does not give."""
    if not card.embedding_size:
        text = f"the model '{card.model}' does not give embeddings"
        raise InvalidRequest(text, param="model", code="unsupported")
    if call.dimensions not in (None, card.embedding_size):
        raise InvalidRequest(
            f"'dimensions': this model's vectors have {card.embedding_size} and are not cut, "
            f"saw {call.dimensions}",
            param="dimensions",
            code="unsupported_value",
        )


def _inputs(given: msgspec.Raw) -> tuple[Sequence[str | list[int]], bool]:
    found = _BEGINNING.match(bytes(given))
    listed, first = (found[1], found[2]) if found and given != ABSENT else (b"", b"")
    match listed, first:
        case b"", b'"':
            return [decode_as(_text_decoder, given, at="input")], False
        case b"[", b'"':
            return _few(decode_as(_texts_decoder, given, at="input")), True
        case b"[", b"[":
            return _few(decode_as(_all_ids_decoder, given, at="input")), True
        case b"[", b"]":
            raise InvalidRequest(f"'input': expected {_FORMS}, saw none", param="input")
        case b"[", _:
            return [decode_as(_ids_decoder, given, at="input")], False
    raise InvalidRequest(f"'input': expected {_FORMS}", param="input", code="invalid_type")


def _few(inputs: list[T]) -> list[T]:
    if len(inputs) > MAX_INPUTS:
        text = f"'input': expected at most {MAX_INPUTS} inputs, saw {len(inputs)}"
        raise InvalidRequest(text, param="input")
    return inputs


def embedding(vector: bytes, index: int, *, base64: bool) -> bytes:
    """A vector of little-endian float32 as JSON."""
    value: list[float] | str
    if base64:
        value = b64encode(vector).decode()
    else:
        numbers = array("f", vector)
        if sys.byteorder == "big":
            numbers.byteswap()
        value = numbers.tolist()
    return msgspec.json.encode(Embedding(index=index, embedding=value))


def embedding_list(data: list[bytes], *, model: str, tokens: int) -> bytes:
    """The answer; `data` are the embeddings as JSON."""
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    rest = msgspec.json.encode(EmbeddingList(data=[], model=model, usage=usage))
    head, tail = rest.split(b'"data":[]', 1)
    return b"".join((head, b'"data":[', b",".join(data), b"]", tail))
