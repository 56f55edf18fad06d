"""Every path of the gateway."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_gateway.admission.models import Models
from diptych_gateway.batches.room import BatchRoom
from diptych_gateway.completions.chat import ChatCompletions
from diptych_gateway.completions.text import Completions
from diptych_gateway.doors import docs_page, openapi
from diptych_gateway.doors.endpoints import ENDPOINTS
from diptych_gateway.doors.envelope import Envelope
from diptych_gateway.doors.objects import Health, ModelList, model_object
from diptych_gateway.doors.origins import Origins
from diptych_gateway.listening.reading import JSON
from diptych_gateway.responses.serving import Answering, Responses
from diptych_gateway.sockets.chat_socket import ChatSocket
from diptych_gateway.sockets.responses_socket import ResponsesSocket
from diptych_gateway.tenancy.administering import Administering, admin_right
from diptych_gateway.tenancy.identity import Identity, Told
from diptych_gateway.tenancy.keyring import Keyring
from diptych_gateway.texts.embedding import Embeddings
from diptych_gateway.texts.tokenizing import Tokenizing
from diptych_policy.access import Right
from diptych_telemetry import metrics

CHAT_COMPLETIONS = "/v1/chat/completions"
ONE_CHAT = f"{CHAT_COMPLETIONS}/{{completion_id}}"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
RESPONSES = "/v1/responses"
ONE_RESPONSE = f"{RESPONSES}/{{response_id}}"
METRICS = "/metrics"
OPEN = frozenset({"/health/live", "/health/ready", "/openapi.json", "/docs"})
"""Say nothing of anybody, so they ask for no key."""

Reasons = Callable[[], list[str]]
"""Why this gateway does not serve; empty if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generating:
    """The routes that generate."""

    chat: ChatCompletions
    completions: Completions
    responses: Responses
    socket: ResponsesSocket
    chat_socket: ChatSocket
    text: Tokenizing
    embeddings: Embeddings
    batch_room: BatchRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """Who is let in, and what they are told of their limits."""

    keyring: Keyring
    told: Told
    administering: Administering
    open_metrics: bool = False
    origins: tuple[str, ...] = ()
    """Sites whose pages are served."""


def application(
    generating: Generating, models: Models, *, guarding: Guarding, reasons: Reasons, rng: Random
) -> ASGIApp:
    """The whole of the gateway's HTTP side."""
    found = [*routes(generating, models, reasons=reasons), *guarding.administering.routes()]
    router = Router(routes=found, redirect_slashes=False)
    guarded = Identity(
        router,
        keyring=guarding.keyring,
        needs=partial(needs, open_metrics=guarding.open_metrics),
        told=guarding.told,
        denied=guarding.administering.denied,
    )
    return Origins(Envelope(guarded, rng=rng, endpoint=endpoint), guarding.origins, rng=rng)


def routes(generating: Generating, models: Models, *, reasons: Reasons) -> list[BaseRoute]:
    """Every route; what `/openapi.json` says of each stands in `endpoints`."""
    responses, text = generating.responses, generating.text
    return by_path(
        [
            Route(CHAT_COMPLETIONS, generating.chat, methods=["POST"]),
            WebSocketRoute(CHAT_COMPLETIONS, generating.chat_socket),
            Route(COMPLETIONS, generating.completions, methods=["POST"]),
            Route(ONE_CHAT, Answering(generating.chat.resumption.retrieve), methods=["GET"]),
            Route(RESPONSES, Answering(responses.create), methods=["POST"]),
            WebSocketRoute(RESPONSES, generating.socket),
            Route(ONE_RESPONSE, Answering(responses.retrieve), methods=["GET"]),
            Route(ONE_RESPONSE, Answering(responses.delete), methods=["DELETE"]),
            Route(f"{ONE_RESPONSE}/cancel", Answering(responses.cancel), methods=["POST"]),
            Route(f"{ONE_RESPONSE}/input_items", Answering(responses.input_items), methods=["GET"]),
            Route("/tokenize", Answering(text.tokenize), methods=["POST"]),
            Route("/detokenize", Answering(text.detokenize), methods=["POST"]),
            Route("/v1/embeddings", Answering(generating.embeddings.create), methods=["POST"]),
            *generating.batch_room.routes(),
            *_about_models(models),
            *_about_this_gateway(reasons),
        ]
    )


def _about_models(models: Models) -> list[BaseRoute]:
    async def list_models(request: Request) -> Response:
        return _json(ModelList(data=[model_object(card) for card in models]))

    async def one_model(request: Request) -> Response:
        return _json(model_object(models.get(request.path_params["model"]).card))

    return [Route(MODELS, list_models), Route(f"{MODELS}/{{model:path}}", one_model)]


def _about_this_gateway(reasons: Reasons) -> list[BaseRoute]:
    async def live(request: Request) -> Response:
        return _json(Health(ok=True, reasons=[]))

    async def ready(request: Request) -> Response:
        found = reasons()
        return _json(Health(ok=not found, reasons=found), status=503 if found else 200)

    async def measured(request: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": metrics.CONTENT_TYPE})

    async def described(request: Request) -> Response:
        return Response(openapi.document(), media_type=JSON)

    async def page(request: Request) -> Response:
        return Response(docs_page.page(), headers=docs_page.HEADERS)

    return [
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route(METRICS, measured),
        Route("/openapi.json", described),
        Route("/docs", page),
    ]


class _Methods:
    """An ASGI application out of one per method."""

    def __init__(self, apps: dict[str, ASGIApp]) -> None:
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._apps[scope["method"]](scope, receive, send)


def by_path(given: list[BaseRoute]) -> list[BaseRoute]:
    """`given`, with the methods of a path in one route: a 405 then names them all."""
    apps: dict[str, dict[str, ASGIApp]] = {}
    for route in given:
        if isinstance(route, Route):
            known = apps.setdefault(route.path, {})
            known.update(dict.fromkeys(route.methods or (), route.app))
    several = [Route(path, _Methods(found), methods=sorted(found)) for path, found in apps.items()]
    return [*(route for route in given if not isinstance(route, Route)), *several]


_PLAIN = frozenset(e.path for e in ENDPOINTS if "{" not in e.path)
_WITH_NAMES = [
    (re.compile(re.sub(r"{\w+}", "[^/]+", e.path)), e.path) for e in ENDPOINTS if "{" in e.path
]


def needs(method: str, path: str, *, open_metrics: bool = False) -> Right | None:
    """The right that `path` takes; None: it is open to everybody."""
    if path in OPEN or (open_metrics and path == METRICS):
        return None
    if path == METRICS:
        return Right.LOOK
    if (right := admin_right(path)) is not None:
        return right
    if method in ("GET", "HEAD") and (path == MODELS or path.startswith(f"{MODELS}/")):
        return Right.LIST
    return Right.ASK


def endpoint(path: str) -> str:
    """What metrics call `path`: as `endpoints` has it, or `other`."""
    if path in _PLAIN:
        return path
    return next((name for known, name in _WITH_NAMES if known.fullmatch(path)), "other")


def _json(value: msgspec.Struct, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type=JSON)
