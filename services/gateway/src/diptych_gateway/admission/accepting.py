"""From a checked call to a stored request: tokens, limits, and JetStream's word that it has it."""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import msgspec

from diptych_bus.port import Bus
from diptych_contracts import subjects
from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import (
    BusAway,
    ContextOverflow,
    InvalidRequest,
    StoreFull,
    Transient,
)
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.keys import DEFAULT_TENANT
from diptych_contracts.prompts import MAX_INLINE_TOKENS, compact
from diptych_contracts.requests import Deadlines, PriorityClass, Request
from diptych_contracts.sampling import Stopping
from diptych_gateway.admission.answer_plans import Plan, planned, template_variables
from diptych_gateway.admission.long_prompts import LongPrompts, named
from diptych_gateway.admission.measuring import check_fits, may_overflow, overflow
from diptych_gateway.admission.models import Models, ServedModel
from diptych_gateway.judging.checking import Call, Prompt
from diptych_gateway.judging.structured import GrammarChecks
from diptych_gateway.judging.supported import check_plan, check_supported
from diptych_gateway.judging.token_checks import check_bias
from diptych_policy.voices import secret_of
from diptych_telemetry import logger
from diptych_text.codec import TextCodec

LONG_TEXT_CHARS = 4_000
"""Beyond this, about 2 ms of tokenizing, the work leaves the event loop."""
MESSAGE_CHARS = 64
"""What rendering one more message takes, in characters of text."""
_SEED_BITS = 63
_PAUSE_S = 0.05
_ATTEMPT_S = 0.5

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is, for the parts a call does not say."""

    gateway: Incarnation
    deadlines: Mapping[PriorityClass, Deadlines]
    default_max_tokens: int
    """Longest answer to a call that names no limit."""
    key: bytes = field(repr=False)
    """What the secrets of its requests are made of; drawn anew in each life."""

    def secret(self, request_id: RequestId) -> bytes:
        """The secret of a request that comes in here."""
        return secret_of(self.key, request_id)


class Acceptance:
    """Makes requests out of calls and stores them.

    Args:
        bus: Where they are stored.
        models: Which there are, and how they write.
        executor: Of one thread, for long texts.
        rng: Draws seeds.
        unix_ms: Wall time.
    """

    def __init__(
        self,
        bus: Bus,
        models: Models,
        *,
        executor: Executor,
        rng: Random,
        unix_ms: Callable[[], int],
    ) -> None:
        self._bus = bus
        self._unix_ms = unix_ms
        self._long_prompts = LongPrompts(bus)
        self._models = models
        self._executor = executor
        self._rng = rng
        self._grammars = GrammarChecks(executor)

    async def request(
        self,
        call: Call,
        request_id: RequestId,
        *,
        identity: Identity,
        tenant: str = DEFAULT_TENANT,
    ) -> tuple[Request, ServedModel, bytes]:
        """The request that `call` describes, not stored yet, and its prompt if that is long.

        Raises:
            UnknownModel, Transient: see `Models.get`.
            InvalidRequest: the chat template refuses the messages, or makes nothing of them; the
                grammar, or another parameter, cannot be obeyed.
            ContextOverflow: prompt and answer do not fit.
        """
        served = self._models.get(call.model)
        check_supported(call, served.card)
        check_bias(call.sampling.logit_bias, served.card)
        if (wanted := call.sampling.grammar) is not None:
            await self._grammars.check(wanted, served.card, param=call.grammar_param)
        prompt_ids = await self.prompt_ids(call, served)
        sampling = call.sampling
        if not call.seeded:
            sampling = msgspec.structs.replace(sampling, seed=self._rng.getrandbits(_SEED_BITS))
        made = await self._planned(call, served, prompt_ids)
        request = Request(
            request_id=request_id,
            gateway=identity.gateway,
            model=call.model,
            tenant=tenant,
            priority_class=call.priority_class,
            prompt_ids=tuple(prompt_ids) if len(prompt_ids) <= MAX_INLINE_TOKENS else (),
            sampling=msgspec.structs.replace(sampling, grammar=made.grammar),
            stopping=Stopping(
                max_tokens=room(
                    call.max_tokens,
                    len(prompt_ids),
                    context_tokens=served.card.context_tokens,
                    default_tokens=identity.default_max_tokens,
                    param=call.messages_param,
                ),
                stop=call.stop,
                ignore_eos=call.ignore_eos,
            ),
            deadlines=identity.deadlines[call.priority_class],
            forced=call.forced,
            resume=call.resume,
            background=call.background,
            answer_format=made.format,
            created_unix_ms=self._unix_ms(),
            secret=identity.secret(request_id),
        )
        if len(prompt_ids) <= MAX_INLINE_TOKENS:
            return request, served, b""
        ref, prompt = await asyncio.get_running_loop().run_in_executor(
            self._executor,
            partial(named, prompt_ids, request_id, tenant=request.tenant, card=served.card),
        )
        return msgspec.structs.replace(request, prompt=ref), served, prompt

    def served(self, model: str) -> ServedModel:
        """The model of that name. Raises what `Models.get` raises."""
        return self._models.get(model)

    async def _planned(self, call: Call, served: ServedModel, prompt_ids: Sequence[int]) -> Plan:
        """What the answer may be. Raises `InvalidRequest` for what its engine cannot obey."""
        plan = planned(call, served, prompt_ids)
        if plan.grammar is not None and plan.grammar is not call.sampling.grammar:
            check_plan(plan.grammar, served.card, param=plan.param)
            await self._grammars.check(plan.grammar, served.card, param=plan.param)
        return plan

    async def prompt_ids(self, call: Call, served: ServedModel) -> Sequence[int]:
        """The tokens of `call`'s messages or prompt, at least one.

        Raises:
            InvalidRequest: there is no text, it cannot be told in tokens, or a token is none.
            ContextOverflow: there are too many.
        """
        variables = template_variables(call.effort, served.codec, param=call.effort_param)
        try:
            prompt_ids = await self._tokenize(call, served, variables)
        except InvalidRequest as err:
            err.param = call.messages_param  # the template knows them as `messages`
            raise
        if not prompt_ids:
            what = "the messages hold" if call.prompt is None else "the prompt holds"
            raise InvalidRequest(f"{what} no text at all", param=call.messages_param)
        return prompt_ids

    async def store(self, request: Request, prompt: bytes = b"", *, timeout_s: float) -> None:
        """Have JetStream's word that it holds `request`, a long `prompt` of it first.

        Raises:
            Transient: the prompt is not stored.
            BusAway: see below; the prompt is then taken back.
        """
        if request.prompt is None:
            await self._store(request, timeout_s=timeout_s)
            return
        try:
            await self._long_prompts.store(request.prompt, prompt, timeout_s=timeout_s)
            await self._store(request, timeout_s=timeout_s)
        except BaseException:
            await self._long_prompts.take_back(request.prompt)
            raise

    async def _store(self, request: Request, *, timeout_s: float) -> None:
        """Have JetStream's word that it holds `request`, asking again with the same id.

        A try counts for no longer than it was given: in a flood this process may be late to hear an
        answer that was in time (2,000 clients at once: 150 of 200 requests were given up so).

        Raises:
            StoreFull: there is no room; it is not stored.
            BusAway: there was none in `timeout_s`. It may be stored nevertheless, now or later:
                whoever gives it up must mark it as cancelled.
        """
        clock = asyncio.get_running_loop().time
        left_s = timeout_s
        subject = subjects.request(request.priority_class, request.model)
        while True:
            began_s, attempt_s = clock(), max(_PAUSE_S, min(left_s, _ATTEMPT_S))
            try:
                await self._bus.store(
                    subject,
                    request,
                    msg_id=request.request_id,
                    timeout_s=attempt_s,
                    headers=request.headers,
                )
            except StoreFull:
                raise
            except Transient as err:
                left_s -= min(clock() - began_s, attempt_s) + _PAUSE_S
                if left_s > 0:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                log.warning("request_not_accepted", request_id=request.request_id, error=str(err))
                raise BusAway(f"the request was not accepted within {timeout_s:g} s") from err
            return

    async def _tokenize(
        self, call: Call, served: ServedModel, variables: dict[str, Any]
    ) -> Sequence[int]:
        if call.prompt is not None:
            return await self._tokenize_text(call, call.prompt, served)
        tools = call.tooling.tools if call.tooling is not None else ()
        if call.text_chars + MESSAGE_CHARS * len(call.messages) < LONG_TEXT_CHARS:
            return served.codec.encode_chat(call.messages, tools=tools, variables=variables)
        if may_overflow(call.text_chars, served.card.context_tokens):
            texts = [message["content"] or "" for message in call.messages]
            await self._check_fits(texts, call, served)
        parts = served.far_codec.chat_parts(call.messages, tools=tools, variables=variables)
        return await self._gathered(parts, call, served)

    async def _tokenize_text(
        self, call: Call, prompt: Prompt, served: ServedModel
    ) -> Sequence[int]:
        if prompt.ids is not None:
            check_known(prompt, served.card)
            return prompt.ids
        if call.text_chars < LONG_TEXT_CHARS:
            return served.codec.encode(prompt.text)
        if may_overflow(call.text_chars, served.card.context_tokens):
            await self._check_fits([prompt.text], call, served)
        return await self._gathered(served.far_codec.text_parts(prompt.text), call, served)

    async def _check_fits(self, texts: list[str], call: Call, served: ServedModel) -> None:
        await check_fits(
            texts,
            partial(_count, served.far_codec),
            context_tokens=served.card.context_tokens,
            executor=self._executor,
            param=call.messages_param,
        )

    async def _gathered(
        self, parts: Iterator[list[int]], call: Call, served: ServedModel
    ) -> Sequence[int]:
        loop, most = asyncio.get_running_loop(), served.card.context_tokens
        ids = compact(served.card.vocab_size)
        # Others' texts have their turn on that thread between two parts.
        while part := await loop.run_in_executor(self._executor, _next_part, parts, ids):
            ids += part
            if len(ids) > most:
                raise overflow(most, call.messages_param)
        return ids


def _next_part(parts: Iterator[list[int]], kind: "array[int]") -> "array[int] | None":
    """The next ids, in the type of `kind`; None: there are no more."""
    for part in parts:
        if part:
            return array(kind.typecode, part)
    return None


def check_known(prompt: Prompt, card: ModelCard) -> None:
    """Raise `InvalidRequest` for a token that the model does not have."""
    if prompt.highest >= card.vocab_size:
        text = f"'prompt': expected token ids below {card.vocab_size}, saw {prompt.highest}"
        raise InvalidRequest(text, param="prompt")


def _count(codec: TextCodec, text: str) -> int:
    return len(codec.encode(text, add_bos=False))


def room(
    asked: int | None,
    prompt_tokens: int,
    *,
    context_tokens: int,
    default_tokens: int,
    param: str = "messages",
) -> int:
    """How long the answer may be: as asked, or the default as far as the context allows.

    Raises:
        ContextOverflow: says what was asked for and what there is.
    """
    left = context_tokens - prompt_tokens
    if asked is None:
        if left >= 1:
            return min(left, default_tokens)
        alone = "the prompt alone has" if param == "prompt" else "the messages alone have"
        wanted = f"{alone} {prompt_tokens}"
    elif asked <= left:
        return asked
    else:
        total = prompt_tokens + asked
        where = "prompt" if param == "prompt" else "messages"
        wanted = f"{total} were asked for: {prompt_tokens} in the {where}, {asked} to generate"
    raise ContextOverflow(
        f"this model's context holds {context_tokens} tokens, but {wanted}", param=param
    )
