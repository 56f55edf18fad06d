"""Every path of the gateway."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp

from diptych_contracts.cards import ModelCard
from diptych_gateway.batch_room import BatchRoom, batch_endpoint
from diptych_gateway.chat import ChatCompletions
from diptych_gateway.completions import Completions
from diptych_gateway.envelope import Envelope
from diptych_gateway.identity import Identity, Told
from diptych_gateway.keyring import Keyring
from diptych_gateway.models import Models
from diptych_gateway.reading import JSON
from diptych_gateway.responses import Answering, Responses
from diptych_gateway.sockets import ResponsesSocket
from diptych_policy.access import Right
from diptych_telemetry import metrics

CHAT_COMPLETIONS = "/v1/chat/completions"
ONE_CHAT = f"{CHAT_COMPLETIONS}/{{completion_id}}"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
RESPONSES = "/v1/responses"
ONE_RESPONSE = f"{RESPONSES}/{{response_id}}"
CANCEL_RESPONSE = f"{ONE_RESPONSE}/cancel"
LIVE = "/health/live"
READY = "/health/ready"
METRICS = "/metrics"
ENDPOINTS = frozenset({CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, MODELS, LIVE, READY, METRICS})
OPEN = frozenset({LIVE, READY, "/openapi.json", "/docs"})
"""Say nothing of anybody, so they ask for no key."""

Reasons = Callable[[], list[str]]
"""Why this gateway does not serve; empty if it does."""


class ModelObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str
    context_length: int
    """An extension: prompt and answer together, in tokens."""


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelObject]


class Health(msgspec.Struct):
    ok: bool
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generating:
    """The routes that generate."""

    chat: ChatCompletions
    completions: Completions
    responses: Responses
    socket: ResponsesSocket
    batch_room: BatchRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """Who is let in, and what they are told of their limits."""

    keyring: Keyring
    told: Told
    open_metrics: bool = False


def application(
    generating: Generating, models: Models, *, guarding: Guarding, reasons: Reasons, rng: Random
) -> ASGIApp:
    """The whole of the gateway's HTTP side."""
    responses = generating.responses

    async def list_models(request: Request) -> Response:
        return _json(ModelList(data=[_model(card) for card in models]))

    async def one_model(request: Request) -> Response:
        return _json(_model(models.get(request.path_params["model"]).card))

    async def live(request: Request) -> Response:
        return _json(Health(ok=True, reasons=[]))

    async def ready(request: Request) -> Response:
        found = reasons()
        return _json(Health(ok=not found, reasons=found), status=503 if found else 200)

    async def measured(request: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": metrics.CONTENT_TYPE})

    router = Router(
        routes=[
            Route(CHAT_COMPLETIONS, generating.chat, methods=["POST"]),
            Route(COMPLETIONS, generating.completions, methods=["POST"]),
            Route(ONE_CHAT, Answering(generating.chat.resumption.retrieve), methods=["GET"]),
            Route(RESPONSES, Answering(responses.create), methods=["POST"]),
            WebSocketRoute(RESPONSES, generating.socket),
            Route(ONE_RESPONSE, Answering(responses.retrieve), methods=["GET"]),
            Route(ONE_RESPONSE, Answering(responses.delete), methods=["DELETE"]),
            Route(CANCEL_RESPONSE, Answering(responses.cancel), methods=["POST"]),
            *generating.batch_room.routes(),
            Route(MODELS, list_models),
            Route(f"{MODELS}/{{model:path}}", one_model),
            Route(LIVE, live),
            Route(READY, ready),
            Route(METRICS, measured),
        ],
        redirect_slashes=False,
    )
    guarded = Identity(
        router,
        keyring=guarding.keyring,
        needs=partial(needs, open_metrics=guarding.open_metrics),
        told=guarding.told,
    )
    return Envelope(guarded, rng=rng, endpoint=endpoint)


def needs(method: str, path: str, *, open_metrics: bool = False) -> Right | None:
    """The right that `path` takes; None: it is open to everybody."""
    if path in OPEN or (open_metrics and path == METRICS):
        return None
    if path == METRICS:
        return Right.LOOK
    if method in ("GET", "HEAD") and (path == MODELS or path.startswith(f"{MODELS}/")):
        return Right.LIST
    return Right.ASK


def endpoint(path: str) -> str:
    """What metrics call `path`."""
    if path in ENDPOINTS:
        return path
    if path.startswith(f"{CHAT_COMPLETIONS}/"):
        return ONE_CHAT
    if path.startswith(f"{RESPONSES}/"):
        return CANCEL_RESPONSE if path.endswith("/cancel") else ONE_RESPONSE
    return batch_endpoint(path) or "other"


def _model(card: ModelCard) -> ModelObject:
    return ModelObject(
        id=card.model,
        created=card.created_unix_s,
        owned_by=card.owner,
        context_length=card.context_tokens,
    )


def _json(value: msgspec.Struct, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type=JSON)
