"""`/tokenize` and `/detokenize`."""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import chain

import msgspec
from starlette.types import Receive, Scope, Send

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.prompts import compact
from diptych_gateway.admission.accepting import LONG_TEXT_CHARS
from diptych_gateway.admission.admitting import admitted
from diptych_gateway.admission.models import Models, ServedModel
from diptych_gateway.answering.delivering import send_json
from diptych_gateway.listening.intake import Intake
from diptych_gateway.texts.tokenizing_bodies import (
    MAX_TOKENS,
    Asked,
    DetokenizeBody,
    Text,
    Tokens,
    decode_detokenize,
    decode_tokenize,
)
from diptych_policy.admission import Admission
from diptych_text.codec import TextCodec

_SHORT_TOKENS = 4096
"""About 2 ms of looking up and writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizing:
    """The handlers. A request holds a place: the thread that tokenizes is everybody's."""

    admission: Admission
    intake: Intake
    models: Models
    executor: Executor
    now_s: Callable[[], float]

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /tokenize`."""
        body = await self.intake.read(scope["headers"], receive)
        with admitted(self.admission, self.now_s):
            size = len(body)
            asked = await self.intake.judged(size, partial(decode_tokenize, body))
            del body
            served = self._served(asked.model)
            ids = await self._ids(asked, served, size)
            far = len(ids) > _SHORT_TOKENS
            codec = served.far_codec if far else served.codec
            most = served.card.context_tokens
            answer = partial(_tokens, ids, codec, most=most, strings=asked.strings)
            await send_json(send, 200, await self._made(answer, far=far))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /detokenize`."""
        body = await self.intake.read(scope["headers"], receive)
        with admitted(self.admission, self.now_s):
            asked = await self.intake.judged(len(body), partial(decode_detokenize, body))
            served = self._served(asked.model)
            far = len(asked.tokens) > _SHORT_TOKENS
            codec = served.far_codec if far else served.codec
            await send_json(send, 200, await self._made(partial(_text, asked, codec), far=far))

    def _served(self, model: str | None) -> ServedModel:
        if model is not None:
            return self.models.get(model)
        known = [card.model for card in self.models]
        if len(known) != 1:
            text = f"'model' is required where not one model is served but {len(known)}"
            raise InvalidRequest(text, param="model", code="missing_required_parameter")
        return self.models.get(known[0])

    async def _ids(self, asked: Asked, served: ServedModel, size: int) -> Sequence[int]:
        try:
            if size < LONG_TEXT_CHARS:
                return list(chain.from_iterable(_parts(asked, served.codec)))
            loop = asyncio.get_running_loop()
            parts = _parts(asked, served.far_codec)
            ids: array[int] = compact(served.card.vocab_size)
            # Others' texts have their turn on that thread between two parts.
            while (
                part := await loop.run_in_executor(self.executor, next, parts, None)
            ) is not None:
                ids.extend(part)
                if len(ids) > MAX_TOKENS:
                    text = f"'{asked.param}': expected at most {MAX_TOKENS} tokens, saw more"
                    raise InvalidRequest(text, param=asked.param)
        except InvalidRequest as err:
            err.param = asked.param  # the template knows only messages
            raise
        return ids

    async def _made(self, make: Callable[[], bytes], *, far: bool) -> bytes:
        if not far:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self.executor, make)


def _parts(asked: Asked, codec: TextCodec) -> Iterator[list[int]]:
    if asked.prompt is None:
        return codec.chat_parts(asked.messages, add_generation_prompt=asked.add_generation_prompt)
    return codec.text_parts(asked.prompt, add_bos=None if asked.add_special_tokens else False)


def _tokens(ids: Sequence[int], codec: TextCodec, *, most: int, strings: bool) -> bytes:
    names = [codec.control_text(token) for token in ids] if strings else None
    answer = Tokens(count=len(ids), max_model_len=most, tokens=list(ids), token_strs=names)
    return msgspec.json.encode(answer)


def _text(asked: DetokenizeBody, codec: TextCodec) -> bytes:
    size = codec.vocab_size
    for place, token in enumerate(asked.tokens):
        if not 0 <= token < size:
            at = f"tokens[{place}]"
            raise InvalidRequest(f"'{at}': expected 0 to {size - 1}, saw {token}", param=at)
    return msgspec.json.encode(Text(prompt=codec.written(asked.tokens)))
