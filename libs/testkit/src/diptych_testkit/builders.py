"""Builders: a test states only what matters to it."""

from typing import Any

import msgspec

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.fleet import Role, WorkerLoad, WorkerRegistration
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import Generation
from diptych_contracts.journal import End, EndReason, TokenEntry
from diptych_contracts.prompts import PromptRef, compact, digest_of, packed
from diptych_contracts.requests import Request
from diptych_contracts.sampling import Sampling, Stopping
from diptych_contracts.transfers import LinkEndpoint

MODEL = "toy"
GATEWAY = Incarnation("gateway-1")
REQUEST = RequestId("r1")
LAYOUT = KvLayout(
    layout_id="toy", engine_build="toy-1", block_tokens=64, slot_bytes=4096, dtype="u32"
)
FINGERPRINT = Fingerprint(base="toy-base", weights="toy-weights")


def a_request(request_id: str = REQUEST, **changes: Any) -> Request:
    """A small greedy request."""
    values: dict[str, Any] = {
        "request_id": RequestId(request_id),
        "gateway": GATEWAY,
        "model": MODEL,
        "prompt_ids": (1, 2, 3),
        "sampling": Sampling(temperature=0.0),
        "stopping": Stopping(max_tokens=16),
        "created_unix_ms": 0,
    }
    return Request(**(values | changes))


def by_reference(request: Request) -> tuple[Request, bytes]:
    """`request` as it is where its prompt is long, and the object that it names."""
    width, data = packed(compact(1000, request.prompt_ids))
    ref = PromptRef(
        name=request.request_id,
        tokens=request.prompt_tokens,
        width=width,
        digest=digest_of(data),
    )
    return msgspec.structs.replace(request, prompt_ids=(), prompt=ref), data


def a_generation(request_id: str = REQUEST, attempt: int = 1, **changes: Any) -> Generation:
    """The job form of `a_request`."""
    values: dict[str, Any] = {
        "request_id": RequestId(request_id),
        "attempt": attempt,
        "gateway": GATEWAY,
        "model": MODEL,
        "tenant": "default",
        "prompt_ids": (1, 2, 3),
        "sampling": Sampling(temperature=0.0),
        "stopping": Stopping(max_tokens=16),
        "budget_ms": 60_000,
    }
    return Generation(**(values | changes))


def a_worker(worker: str, role: Role = Role.DECODE, **changes: Any) -> WorkerRegistration:
    """A worker that shares its host and model with all others built here."""
    endpoint = LinkEndpoint(
        kind="shm", host="host-1", address=f"/dev/shm/{worker}", slots=8, slot_bytes=4096
    )
    values: dict[str, Any] = {
        "worker": Incarnation(worker),
        "role": role,
        "engine": "toy",
        "model": MODEL,
        "fingerprint": FINGERPRINT,
        "layout": LAYOUT,
        "endpoints": (endpoint,),
        "max_sequences": 4,
        "kv_tokens": 1024,
        "context_tokens": 512,
        "host": "host-1",
    }
    return WorkerRegistration(**(values | changes))


def a_load(worker: str, **changes: Any) -> WorkerLoad:
    """An idle worker's telemetry."""
    return WorkerLoad(worker=Incarnation(worker), **changes)


def tokens(*token_ids: int, index: int = 0, attempt: int = 1, of: str = REQUEST) -> TokenEntry:
    """Tokens of one request, as the journal holds them."""
    return TokenEntry(request_id=RequestId(of), attempt=attempt, index=index, token_ids=token_ids)


def an_end(
    reason: EndReason = EndReason.STOP,
    *,
    attempt: int = 1,
    of: str = REQUEST,
    tokens: int | None = None,
) -> End:
    """An end of one request."""
    return End(request_id=RequestId(of), attempt=attempt, reason=reason, tokens=tokens)
