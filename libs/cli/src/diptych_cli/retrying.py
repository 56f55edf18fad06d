"""A dead request, tried again: a new background response of the same prompt.

The old id has had its one end, so the new request has an id of its own. It is a function of the old
one and of how often that was retried: two who retry at the same time make one request. Its journal
is that of a gateway that never was; any gateway gives the answer, since it only reads.
"""

import hashlib
import time
from dataclasses import dataclass
from secrets import token_bytes

import msgspec

from diptych_bus.port import Bus
from diptych_cli.failing import CliError
from diptych_cli.graveyard import Grave
from diptych_contracts import subjects
from diptych_contracts.dead import DeadRetried
from diptych_contracts.errors import Conflict, DiptychError
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.prompts import PromptRef
from diptych_contracts.requests import Request
from diptych_contracts.responses import StoredResponse, response_id
from diptych_contracts.streams import (
    DEAD_PROMPTS,
    PROMPTS,
    RESPONSES,
    RUNNING_RESPONSE_TTL_S,
)
from diptych_policy.voices import SECRET_BYTES

RETRIED_FROM = "diptych_retried_from"
"""Key in the new response's metadata."""
_STORE_S = 3.0
_ID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Retry:
    """A new request for an old one."""

    request: Request
    of: RequestId

    @property
    def response_id(self) -> str:
        """Where its answer is."""
        return response_id(self.request.request_id)


def retry_of(grave: Grave, *, again: bool, now_unix_ms: int) -> Retry:
    """The request that tries `grave` once more.

    Raises:
        CliError: there is nothing to try, or that was done before and not asked for `again`.
    """
    request = grave.request
    if request is None:
        raise CliError(f"{grave.id} cannot be retried: the request itself was not kept")
    if grave.retries and not again:
        last = response_id(grave.retries[-1].retried_as)
        raise CliError(f"{grave.id} was retried already, as {last}; once more with --again")
    text = f"{grave.id}:{len(grave.retries)}".encode()
    digest = hashlib.sha256(text).hexdigest()[:_ID_DIGITS]
    made = msgspec.structs.replace(
        request,
        request_id=RequestId(digest),
        gateway=Incarnation(f"retry-{digest[:12]}"),
        created_unix_ms=now_unix_ms,
        resume=True,
        background=True,
        secret=token_bytes(SECRET_BYTES),
    )
    return Retry(made, RequestId(grave.id))


async def sent(bus: Bus, retry: Retry) -> None:
    """Have `retry` run.

    Raises:
        CliError: somebody else has just done the same.
        Transient: the bus is away; the same call may be made again.
    """
    responses = bus.bucket(RESPONSES, StoredResponse)
    old = await responses.get(response_id(retry.of))
    stored = _stored(retry, old.value if old is not None else None)
    try:
        await responses.create(stored.response_id, stored, ttl_s=RUNNING_RESPONSE_TTL_S)
    except Conflict as err:
        raise CliError(f"{retry.of} is being retried already, as {stored.response_id}") from err
    try:
        await _store(bus, retry)
    except (DiptychError, CliError):
        await responses.delete(stored.response_id)
        raise
    told = DeadRetried(
        request_id=retry.of,
        retried_as=retry.request.request_id,
        retried_unix_ms=time.time_ns() // 1_000_000,
    )
    subject = subjects.dead_request(retry.of)
    msg_id = f"{subject}.{retry.request.request_id}"
    await bus.store(subject, told, msg_id=msg_id, timeout_s=_STORE_S)


async def prompt_of(bus: Bus, of: RequestId, ref: PromptRef) -> bytes:
    """The object that holds a dead request's long prompt.

    Raises:
        CliError: it is gone.
    """
    data = await bus.get_object(DEAD_PROMPTS, of) or await bus.get_object(PROMPTS, ref.name)
    if data is None:
        raise CliError(f"the prompt of {of} is gone: its {ref.tokens} tokens were not kept")
    return data


async def _store(bus: Bus, retry: Retry) -> None:
    """Store the request, and first a prompt of its own if that is long: it goes with it."""
    request = retry.request
    if request.prompt is not None:
        data = await prompt_of(bus, retry.of, request.prompt)
        await bus.put_object(PROMPTS, request.request_id, data)
        own = msgspec.structs.replace(request.prompt, name=request.request_id)
        request = msgspec.structs.replace(request, prompt=own)
    await bus.store(
        subjects.request(request.priority_class, request.model),
        request,
        msg_id=request.request_id,
        timeout_s=_STORE_S,
        headers=request.headers,
    )


def _stored(retry: Retry, old: StoredResponse | None) -> StoredResponse:
    """The response as which it is read; `old` is the one it was, if it was one."""
    request = retry.request
    whole = old or StoredResponse(
        request_id=request.request_id,
        gateway=request.gateway,
        journal_seq=0,
        model=request.model,
        tenant=request.tenant,
        created_unix_ms=request.created_unix_ms,
        deadline_unix_ms=request.deadline_unix_ms,
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        max_output_tokens=request.stopping.max_tokens,
        input=(),
    )
    if whole.turn is not None:  # an object that goes with the old response
        whole = msgspec.structs.replace(whole, turn=None, input=(), history=None)
    metadata = tuple(pair for pair in whole.metadata if pair[0] != RETRIED_FROM)
    return msgspec.structs.replace(
        whole,
        request_id=request.request_id,
        gateway=request.gateway,
        journal_seq=0,
        created_unix_ms=request.created_unix_ms,
        deadline_unix_ms=request.deadline_unix_ms,
        store=True,
        background=True,
        metadata=(*metadata, (RETRIED_FROM, retry.of)),
        answer=None,
        secret=request.secret,
    )
