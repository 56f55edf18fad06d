"""`POST /v1/embeddings`: texts in, vectors out."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive, Scope, Send

from diptych_bus.port import Bus
from diptych_contracts import subjects
from diptych_contracts.errors import ContextOverflow, Expired, InvalidRequest, Transient
from diptych_contracts.events import RequestEnded
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import End, EndReason
from diptych_gateway import metrics
from diptych_gateway.admission.accepting import LONG_TEXT_CHARS
from diptych_gateway.admission.admitting import admitted
from diptych_gateway.admission.generating import watched
from diptych_gateway.admission.models import Models, ServedModel
from diptych_gateway.answering.delivering import send_json
from diptych_gateway.listening.intake import Intake
from diptych_gateway.listening.reading import ClientGone
from diptych_gateway.tenancy.allowances import Allowances
from diptych_gateway.tenancy.keyring import Renew
from diptych_gateway.texts.embedders import Embedders, Part
from diptych_gateway.texts.embedding_bodies import (
    MAX_INPUT_TOKENS,
    EmbeddingsCall,
    check_fit,
    embedding,
    embedding_list,
    judge_embeddings,
)
from diptych_policy.admission import Admission
from diptych_telemetry import logger

PART_TOKENS = 4096
"""Of one job: one is repeated where its worker dies."""
PART_BYTES = 1024 * 1024
"""Of the vectors of one job."""
_FLOAT_BYTES = 4
_AT_ONCE = 16
"""Vectors written before others have their turn: about 1 ms."""
_METERED_S = 2.0

Text = tuple[int, ...]
log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Computing:
    """What a client waits for."""

    task: "asyncio.Task[list[bytes]]"

    def leave(self) -> None:
        """The client is gone."""
        self.task.cancel()

    def keep_alive(self) -> None:
        """Nothing can be sent before the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """The handler. A request holds a place for as long as it lasts."""

    bus: Bus
    admission: Admission
    intake: Intake
    models: Models
    embedders: Embedders
    allowances: Allowances
    renewed: Renew
    executor: Executor
    now_s: Callable[[], float]
    timeout_s: float

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/embeddings`."""
        deadline_s = self.now_s() + self.timeout_s
        body = await self.intake.read(scope["headers"], receive)
        with admitted(self.admission, self.now_s), self.embedders.request():
            size = len(body)
            call = await self.intake.judged(size, partial(judge_embeddings, body))
            del body
            served = self.models.get(call.model)
            check_fit(call, served.card)
            caller = self.renewed(scope["state"]["caller"])
            self.allowances.check(caller)
            texts = await self._texts(call, served, far=size >= LONG_TEXT_CHARS)
            tokens = sum(map(len, texts))
            taking = await self.allowances.take(caller, tokens)
            request_id = scope["state"]["request_id"]
            parts = list(_parts(texts, request_id, served))
            try:
                vectors = await self._computed(parts, receive, deadline_s)
            except BaseException:
                if taking is not None:
                    taking.undo()
                raise
            if taking is not None:
                taking.settle(tokens)
            await self._meter(request_id, caller.tenant, served, tokens)
            size = served.card.embedding_size * _FLOAT_BYTES
            answer = await _written(call, vectors, size, tokens)
            await send_json(send, 200, answer)

    async def _computed(
        self, parts: Sequence[Part], receive: Receive, deadline_s: float
    ) -> list[bytes]:
        """The vectors of all parts, unless the client leaves meanwhile."""
        task = asyncio.create_task(self._all(parts, deadline_s))
        async with watched(_Computing(task), receive):
            try:
                async with asyncio.timeout(deadline_s - self.now_s()):
                    return await task
            except TimeoutError as err:
                text = f"the vectors were not there within {self.timeout_s:g} s"
                raise Expired(text) from err
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                raise ClientGone from None

    async def _all(self, parts: Sequence[Part], deadline_s: float) -> list[bytes]:
        return [
            (await self.embedders.vectors(part, deadline_s=deadline_s)).vectors for part in parts
        ]

    async def _texts(self, call: EmbeddingsCall, served: ServedModel, *, far: bool) -> list[Text]:
        """The tokens of every input. Raises `InvalidRequest`, which names the input."""
        texts: list[Text] = []
        total = 0
        for number, given in enumerate(call.inputs):
            at = call.at(number)
            try:
                ids = await self._ids(given, served, at=at, far=far)
            except InvalidRequest as err:
                err.param = at
                raise
            total += len(ids)
            if total > MAX_INPUT_TOKENS:
                text = f"'input': expected at most {MAX_INPUT_TOKENS} tokens in all, saw more"
                raise InvalidRequest(text, param="input")
            texts.append(tuple(ids))
        return texts

    async def _ids(
        self, given: str | list[int], served: ServedModel, *, at: str, far: bool
    ) -> Sequence[int]:
        most = served.card.embedding_tokens
        if not isinstance(given, str):
            return _known(given, served, at)
        codec = served.far_codec if far else served.codec
        parts = codec.text_parts(given)
        ids: list[int] = []
        while (part := await self._next(parts, far=far)) is not None:
            ids += part
            if len(ids) > most:
                raise _overflow(at, most, "more")
        return ids

    async def _next(self, parts: Iterator[list[int]], *, far: bool) -> list[int] | None:
        if not far:
            return next(parts, None)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, next, parts, None)

    async def _meter(
        self, request_id: RequestId, tenant: str, served: ServedModel, tokens: int
    ) -> None:
        """Have it counted. What cannot be told in time is not charged."""
        metrics.of_model(served.card.model).prompt_tokens.inc(tokens)
        end = End(request_id=request_id, attempt=1, reason=EndReason.STOP, tokens=0)
        ended = RequestEnded(request_id=request_id, end=end, tenant=tenant, prompt_tokens=tokens)
        try:
            await self.bus.store(
                subjects.event("request_ended"),
                ended,
                msg_id=f"{request_id}.end",
                timeout_s=_METERED_S,
            )
        except Transient as err:
            log.warning("embeddings_not_metered", request_id=request_id, error=str(err))


def _known(ids: list[int], served: ServedModel, at: str) -> list[int]:
    if len(ids) > (most := served.card.embedding_tokens):
        raise _overflow(at, most, str(len(ids)))
    size = served.card.vocab_size
    if wrong := [token for token in ids if not 0 <= token < size]:
        text = f"'{at}': expected token ids from 0 to {size - 1}, saw {wrong[0]}"
        raise InvalidRequest(text, param=at)
    return ids


def _overflow(at: str, most: int, seen: str) -> ContextOverflow:
    text = f"'{at}': this model makes vectors of at most {most} tokens, saw {seen}"
    return ContextOverflow(text, param=at)


def _parts(texts: list[Text], request_id: RequestId, served: ServedModel) -> Iterator[Part]:
    """`texts` in order, a bounded amount each."""
    most = max(1, PART_BYTES // (served.card.embedding_size * _FLOAT_BYTES))
    start = number = 0
    while start < len(texts):
        end, tokens = start + 1, len(texts[start])
        while end < len(texts) and end - start < most and tokens + len(texts[end]) <= PART_TOKENS:
            tokens += len(texts[end])
            end += 1
        yield Part(
            request_id=request_id,
            number=number,
            model=served.card.model,
            texts=texts[start:end],
        )
        start, number = end, number + 1


async def _written(call: EmbeddingsCall, vectors: list[bytes], size: int, tokens: int) -> bytes:
    data: list[bytes] = []
    for some in vectors:
        for at in range(0, len(some), size):
            data.append(embedding(some[at : at + size], len(data), base64=call.base64))
            if len(data) % _AT_ONCE == 0:
                await asyncio.sleep(0)
    return embedding_list(data, model=call.model, tokens=tokens)
